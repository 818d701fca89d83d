"""A text begins as its tokenizer begins texts, and ends where its model ends them."""

import pytest

from shardformer.data import SpecialTokens, load_vocabulary
from shardformer.data.hf_tokenizer import HfTokenizer
from shardformer.data.vocabulary import Bytes
from shardformer.errors import UsageError
from shardformer.inference.text_codec import TextCodec

tokenizers = pytest.importorskip("tokenizers")
UNKNOWN, BEGIN, END, TURN, A, B = range(6)
NAMES = ("<unk>", "<s>", "</s>", "<|eot_id|>")


def tokenizer(*template: str, after: tuple[str, ...] = ()) -> HfTokenizer:
    """Returns a tokenizer of letters; `template` and `after` are the special tokens around a text."""
    model = tokenizers.models.WordLevel({name: i for i, name in enumerate([*NAMES, "a", "b"])}, unk_token="<unk>")
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    found.add_special_tokens(list(NAMES))
    if template or after:
        found.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*template, "$A", *after],
            special_tokens=[(name, NAMES.index(name)) for name in dict.fromkeys([*template, *after])],
        )
    return HfTokenizer("letters", found.to_str())


@pytest.mark.parametrize(
    ("template", "after", "ids"),
    [((), (), ()), (("<s>",), (), (BEGIN,)), ((), ("</s>",), ()), (("<s>",), ("</s>",), (BEGIN,)),
     (("<|eot_id|>", "<s>"), (), (TURN, BEGIN)), (("</s>",), (), (END,))],
)  # fmt: skip
def test_the_template_is_the_ids_before_a_text(template, after, ids):
    assert tokenizer(*template, after=after).template == ids


def test_a_template_is_found_where_no_text_can_be_encoded():
    model = tokenizers.models.WordLevel({"<s>": 0, "word": 1}, unk_token="missing")
    found = tokenizers.Tokenizer(model)
    found.post_processor = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    assert HfTokenizer("words", found.to_str()).template == (0,)


def test_auto_follows_the_vocabulary_or_a_published_template():
    own = tokenizer("<s>")
    assert TextCodec(own).encode("ab") == [A, B]
    assert TextCodec(own, published=True).encode("ab") == [BEGIN, A, B]
    assert TextCodec(own.with_beginning("auto")).encode("ab") == [BEGIN, A, B]
    assert TextCodec(own, bos="false", published=True).encode("ab") == [A, B]
    assert TextCodec(own, bos="true").encode("ab") == [BEGIN, A, B]


def test_a_published_beginning_is_added_on_demand():
    special = SpecialTokens(beginning=BEGIN, ends=(END,))
    assert TextCodec(tokenizer(), special, published=True).encode("a") == [A]
    assert TextCodec(tokenizer(), special, bos="true").encode("a") == [BEGIN, A]


def test_an_end_of_the_template_is_not_added():
    """A continuation would begin after the end of the text."""
    for template in ((), ("<s>",)):
        begun = [BEGIN] * len(template)
        assert TextCodec(tokenizer(*template, after=("</s>",)), published=True).encode("ab") == [*begun, A, B]


def test_a_beginning_that_a_text_spells_is_not_doubled():
    assert TextCodec(tokenizer("<s>"), published=True).encode("<s>a") == [BEGIN, A]
    spelled = TextCodec(tokenizer("<s>"), published=True, special_tokens="false").encode("<s>a")
    assert spelled == [BEGIN, *[UNKNOWN] * 3, A]


def test_bos_is_rejected_for_a_tokenizer_without_one():
    for vocabulary in (Bytes(), tokenizer()):
        with pytest.raises(UsageError, match=r"bos=true: tokenizer=.* has no beginning of text"):
            TextCodec(vocabulary, bos="true")


@pytest.mark.parametrize(
    ("special", "published", "ends"),
    [
        (SpecialTokens(), False, {END}),
        (SpecialTokens(ends=(TURN,)), True, {TURN}),
        (SpecialTokens(ends=(END, TURN)), True, {END, TURN}),
        (SpecialTokens(ends=(TURN,)), False, {END, TURN}),  # trained here, on documents that END separates
        (SpecialTokens(ends=(END,), tokenizer_end=TURN), True, {END, TURN}),
    ],
)
def test_a_text_ends_with_any_end_of_its_model(special, published, ends):
    assert TextCodec(tokenizer(), special, published=published).ends == ends


@pytest.mark.parametrize(
    ("special", "prefix"),
    [
        (SpecialTokens(), END),
        (SpecialTokens(beginning=BEGIN, ends=(TURN,)), BEGIN),
        (SpecialTokens(ends=(TURN,)), TURN),
        (SpecialTokens(beginning=BEGIN, ends=(END,), tokenizer_end=TURN), TURN),  # the tokenizer names no beginning
        (SpecialTokens(beginning=50256, ends=(END,)), END),  # an id that the model lacks
    ],
)
def test_the_prefix_is_the_tokenizers_bos_or_else_its_eos(special, prefix):
    assert TextCodec(tokenizer(), special).prefix == prefix


def test_a_vocabulary_keeps_its_beginning(tmp_path):
    own = tokenizer("<s>").with_beginning("auto")
    for name, text in own.documents(source="x", fingerprint="y").items():
        (tmp_path / name).write_text(text)
    loaded, _ = load_vocabulary(tmp_path)
    assert loaded == own
    assert loaded.beginning == (BEGIN,)
    assert loaded.with_special_tokens().beginning == (BEGIN,)
    assert own.sha256 != own.with_beginning("false").sha256


def test_a_vocabulary_without_beginning_is_as_before():
    """Runs and prepared folders of earlier versions have no such entry."""
    assert set(tokenizer("<s>").record) == {"tokenizer", "sha256", "special_tokens"}
