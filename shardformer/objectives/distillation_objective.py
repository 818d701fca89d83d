"""The objective of a student."""

from shardformer.objectives.objective import OneProgram


class Distillation(OneProgram):
    """The distributions of a teacher, objective=distill."""

    task = "shardformer.objectives.distillation_model:DistillationModel"
    host_feature = "shardformer.objectives.teacher:Teacher"
    has_bound_of_bytes = False

    def check(self) -> None:
        super().check()
        self.check_stages("needs all layers of the teacher in each stage, which has room for some of them")
