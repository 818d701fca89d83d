"""Against transformers itself, where it is installed (pip install transformers torch): it loads what we write."""

import numpy as np
import pytest

from shardformer.__main__ import main
from tests.convert import hf_models
from tests.convert.test_hf import SAME

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_transformers_loads_what_we_write(name, tmp_path):
    theirs = hf_models.make_model(name, seed=1)
    theirs.save_pretrained(tmp_path / "src")
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ))
    np.testing.assert_array_equal(hf_models.compute(back, tokens), hf_models.compute(theirs, tokens))


def test_gpt2_with_its_own_vocabulary(tmp_path):
    theirs = hf_models.make_model("gpt2", vocab_size=50_257)
    theirs.save_pretrained(tmp_path / "src")
    from tests.convert import test_hf

    _, config = test_hf.hf_settings.read_config(tmp_path / "src")
    assert (config.vocab, config.padded_vocab) == (50_257, 50_264)
    ours = test_hf.Model(config.replace(mesh="1x8", batch=2), test_hf.mesh.make(config.replace(mesh="1x8", batch=2)))
    tokens = np.random.RandomState(1).randint(0, 50_257, (2, hf_models.SEQ)).astype(np.int32)
    params = test_hf.on_devices(ours, test_hf.params_of(tmp_path / "src"))
    logits = np.asarray(ours.logits(params, tokens))[..., :50_257]
    assert np.abs(logits - hf_models.compute(theirs, tokens)).max() <= SAME
