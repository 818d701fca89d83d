"""`train teacher=HF_FOLDER`: a teacher in Hugging Face's format is converted to a run first, next to `out`."""

from shardformer import storage
from shardformer.checkpoint import read_config
from shardformer.cli.arguments import say
from shardformer.cli.base_model import convert_once
from shardformer.config import Config, check_zero
from shardformer.convert import hf_settings
from shardformer.data import TokenIds
from shardformer.model.distillation_model import check_teacher
from shardformer.training.run_folder import Run


def convert_teacher(config: Config) -> Config:
    """Returns the configuration of a new run with its teacher as a run, OUT.teacher, which a resume finds again."""
    name = config.preferences.teacher
    if not hf_settings.is_hf_folder(storage.location(name)):
        return config
    target = storage.local_folder(storage.location(f"{config.run.out}.teacher"))
    if (target / "config.json").is_file():
        teacher = read_config(target)
    else:  # reject what training would reject afterwards, before gigabytes are copied and written
        teacher = hf_settings.read_model(storage.location(name), seq=_choose_positions(name, config)).config
    check_teacher(config, teacher, name)
    check_zero(config)
    Run(config, TokenIds(config.model.vocab or 1), "").refuse_to_overwrite()
    source = str(storage.local_path(name, say))
    return config.replace(teacher=convert_once("teacher", source, target, {"seq": _choose_positions(name, config)}))


def _choose_positions(name: str, config: Config) -> int:
    """Returns the student's context if the teacher has a longer table of learned positions, of which a part is read."""
    model = hf_settings.read_model(storage.location(name)).config.model
    return config.model.seq if model.positions == "learned" and config.model.seq < model.seq else 0
