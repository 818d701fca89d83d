"""Five kinds of tokenizer on one small Llama, and the answers of lm-eval's model `hf` with each of them.

`python -m tests.inference.lm_eval_kinds` records the answers; it needs lm-eval, torch and transformers.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

GOLDENS = Path(__file__).parent / "goldens" / "lm_eval.json"
MODEL = Path(__file__).parents[1] / "convert" / "goldens" / "hf" / "llama"  # 61 entries, a context of 24 tokens
VOCAB = 61
TEXT = "the cat sat on the mat, and the other cats that sat there thought that this was their mat. "


class Kind(NamedTuple):
    """A kind of tokenizer, and the texts that are special to it."""

    special: tuple[str, ...]  # entries 0, 1, ...
    template: tuple[str, ...] = ()  # special tokens that the tokenizer puts before a text
    bos: str | None = None
    eos: str = ""
    ends: tuple[str, ...] = ()  # eos_token_id of the model


KINDS = {
    "end of text only": Kind(("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>", ends=("<|endoftext|>",)),
    "<s> added": Kind(("<unk>", "<s>", "</s>"), ("<s>",), "<s>", "</s>", ("</s>",)),
    "<s> not added": Kind(("<unk>", "<s>", "</s>"), (), "<s>", "</s>", ("</s>",)),
    "eos <|eot_id|>": Kind(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|user|>"), ("<|begin_of_text|>",),
        "<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"),
    ),
    "no bos": Kind(("<|user|>", "<|end|>"), (), None, "<|end|>", ("<|end|>",)),
}  # fmt: skip


def list_pairs(kind: Kind) -> list[tuple[str, str]]:
    first, last = kind.special[0], kind.eos
    return [
        ("the cat", " sat"),
        ("", "the mat"),
        ("the cat ", "sat on"),
        (TEXT, " the cat"),
        ("on", TEXT[:60]),
        (f"{first}the cat", " sat"),
        (f"{kind.bos or kind.eos}the cat", " sat"),
        ("", f"{kind.bos or kind.eos}the cat"),
        (f"the{last}", f" cat{last}"),
    ]


def list_texts(kind: Kind) -> list[str]:
    return [TEXT, "the cat", f"{kind.bos or kind.eos}the cat", f"the cat{kind.eos} sat"]


def list_prompts(kind: Kind) -> list[str]:
    return ["the cat", TEXT, "mat, and", f"{kind.special[-1]}that", f"the cat{kind.eos}", "sat there ", "othe", "this"]


SETTINGS = {"until": ["zz"], "max_gen_toks": 10, "do_sample": False}


def make_folder(kind: Kind, folder: Path) -> None:
    """Writes the Hugging Face folder of a kind; it needs the package tokenizers only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True)
    shutil.copy(MODEL / "model.safetensors", folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(kind.special), show_progress=False)
    more = "these others thought what cats say to the mats on that day. "
    tokenizer.train_from_iterator([TEXT * 3, more * 2], trainer)
    assert tokenizer.get_vocab_size() == VOCAB  # `hf` also draws entries that the tokenizer lacks
    ids = {token: tokenizer.token_to_id(token) for token in kind.special}
    if kind.template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*kind.template, "$A"], special_tokens=[(token, ids[token]) for token in kind.template]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [ids[token] for token in kind.ends]
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"bos_token_id": ids.get(kind.bos), "eos_token_id": ends if len(ends) > 1 else ends[0]}
    (folder / "config.json").write_text(json.dumps(config))
    names = {"bos_token": kind.bos, "eos_token": kind.eos, "pad_token": kind.eos}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def ask_hf(kind: Kind, folder: Path) -> dict:
    """Returns the answers of lm-eval's `hf`, one question at a time."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(str(folder), dtype="float32", device="cpu", batch_size=1)

    def ask(method, questions):
        return method([Instance("", {}, question, 0) for question in questions], disable_tqdm=True)

    generate = [(prompt, dict(SETTINGS)) for prompt in list_prompts(kind)]
    return {
        "pairs": ask(model.loglikelihood, list_pairs(kind)),
        "texts": ask(model.loglikelihood_rolling, [(text,) for text in list_texts(kind)]),
        "continuations": ask(model.generate_until, generate),
    }


def main() -> None:
    import tempfile

    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, kind) in enumerate(KINDS.items()):
            make_folder(kind, Path(temporary, str(number)))
            found[name] = ask_hf(kind, Path(temporary, str(number)))
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
