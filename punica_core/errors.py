"""Every error that can reach a user, each with a stable code.

PunicaError
├── RequestError                    the client asked for something that cannot be done (HTTP 4xx)
│   ├── InvalidRequest              a field has a wrong type or value
│   ├── RequestTooLarge             the body exceeds the configured size
│   ├── ContextLengthExceeded       prompt + max_tokens do not fit max_model_len
│   ├── ModelNotFound               no base model or adapter of that name
│   ├── InvalidApiKey               no key was given, or none of ours (HTTP 401)
│   └── PermissionDenied            the key is known, but not for this (HTTP 403)
├── AdapterError                    an adapter exists but cannot be served
│   ├── AdapterInvalid              its files are damaged or inconsistent
│   ├── AdapterUnsupported          its files are sound, but use something that is not supported
│   ├── AdapterMismatch             it was made for another base model (shapes differ)
│   ├── AdapterChanged              its files changed while they were read: try again
│   ├── AdapterTooLarge             it exceeds a configured limit (rank, bytes)
│   └── AdapterLoadTimeout          reading its files made no progress: try again later
├── CapacityError                   try again later (HTTP 429 / 503)
│   ├── QueueFull                   the admission queue is full
│   ├── RateLimited                 a limit of the caller's key is used up
│   ├── EngineRestarting            the worker was lost and a new one is being started
│   └── Draining                    the server is shutting down
├── EngineError                     our fault (HTTP 5xx)
│   ├── WorkerLost                  the worker process died or stalled; in-flight requests ended
│   └── InternalError               an unexpected failure, logged with its traceback
└── ConfigError                     the server cannot start like this; the message says what to change

Errors cross the process boundary as (code, message): see `to_wire` and `from_wire`.
"""

from __future__ import annotations

from typing import ClassVar


class PunicaError(Exception):
    """Base of the tree. `message` is one short paragraph: the value got, the value wanted, the fix."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(PunicaError):
    code = "invalid_request"


class InvalidRequest(RequestError):
    code = "invalid_value"


class RequestTooLarge(RequestError):
    code = "request_too_large"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"


class InvalidApiKey(RequestError):
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    code = "permission_denied"


class AdapterError(PunicaError):
    code = "adapter_error"


class AdapterInvalid(AdapterError):
    code = "adapter_invalid"


class AdapterUnsupported(AdapterError):
    code = "adapter_unsupported"


class AdapterMismatch(AdapterError):
    code = "adapter_mismatch"


class AdapterChanged(AdapterError):
    code = "adapter_changed"


class AdapterTooLarge(AdapterError):
    code = "adapter_too_large"


class AdapterLoadTimeout(AdapterError):
    code = "adapter_load_timeout"


class CapacityError(PunicaError):
    code = "capacity"


class QueueFull(CapacityError):
    code = "queue_full"


class RateLimited(CapacityError):
    """retry_after: seconds until the same request would be admitted."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class EngineRestarting(CapacityError):
    code = "engine_restarting"


class Draining(CapacityError):
    code = "draining"


class EngineError(PunicaError):
    code = "engine_error"


class WorkerLost(EngineError):
    code = "worker_lost"


class InternalError(EngineError):
    code = "internal_error"


class ConfigError(PunicaError):
    code = "config_error"


def _leaves(cls: type[PunicaError]) -> dict[str, type[PunicaError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_leaves(sub))
    return found


def to_wire(error: PunicaError) -> tuple[str, str]:
    """The (code, message) pair that stands for `error` in a protocol message."""
    return error.code, error.message


def from_wire(code: str, message: str) -> PunicaError:
    """The error a (code, message) pair stands for; an unknown code becomes `InternalError`."""
    return _leaves(PunicaError).get(code, InternalError)(message)
