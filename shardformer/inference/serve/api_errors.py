"""The errors of the server in OpenAI's form."""

from typing import Any


class ApiError(Exception):
    """A request that is answered with an error: what was got, what was expected, the fix."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
