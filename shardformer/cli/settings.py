"""The configuration that a command describes or measures, without the data of a run."""

from shardformer import storage
from shardformer.cli.arguments import parse_preset
from shardformer.config import Config, override_on_resume, parsing


def parse_settings(arguments: list[str]) -> Config:
    """Returns the config of 'PRESET|RUN|HF_FOLDER key=value ...'; without vocab=, that of tiny_shakespeare."""
    from shardformer.checkpoint import read_config  # imports JAX, as the next one
    from shardformer.convert import hf_settings

    folder = storage.location(arguments[0]) if arguments else None
    if folder and hf_settings.is_hf_folder(folder):
        _, settings = hf_settings.read_config(folder)
        settings = settings.replace(**parsing.parse_overrides(arguments[1:], Config))
    elif folder and (folder / "config.json").is_file():
        settings = override_on_resume(read_config(folder), parsing.parse_overrides(arguments[1:], Config))
    else:
        settings = parse_preset(arguments)
    return settings.replace(vocab=settings.model.vocab or 65)
