"""The objective of a student."""

from typing import TYPE_CHECKING

from shardformer.objectives.objective import OneProgram

if TYPE_CHECKING:
    from shardformer.config.config import Config


class Distillation(OneProgram):
    """The distributions of a teacher, objective=distill."""

    task = "shardformer.objectives.distillation_model:DistillationModel"
    host_feature = "shardformer.objectives.teacher:Teacher"
    has_bound_of_bytes = False

    def check(self) -> None:
        super().check()
        self.check_stages("needs all layers of the teacher in each stage, which has room for some of them")

    def as_language_model(self) -> "Config":
        """Returns the configuration without a teacher, whose folder may be gone."""
        plain = {"divergence": "forward", "distill_weight": 1.0, "distill_temperature": 1.0}
        return self.config.replace(objective="lm", teacher="", **plain)
