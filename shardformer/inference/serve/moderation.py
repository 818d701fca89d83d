"""The field `moderation`, which asks for an assessment by another model: the answer says that there is none."""

from typing import Any

from shardformer.inference.serve.request_fields import ApiError, take

MISSING = {"type": "error", "code": "not_moderated", "message": "this server has no model for moderation"}


def read_moderation(body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the assessments of an answer; raises ApiError if they were to block texts."""
    asked = take(body, "moderation", dict, None)
    if asked is None:
        return None
    policy = take(asked, "policy", dict, {})
    for side in ("input", "output"):
        if take(take(policy, side, dict, {}), "mode", str, "score") != "score":
            raise ApiError(
                400, f"moderation is to block the {side}, and this server has no model for moderation; leave it out",
                "moderation",
            )  # fmt: skip
    return {"input": MISSING, "output": MISSING}
