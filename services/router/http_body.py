"""What the bodies of all generation endpoints share: strict fields, null as absent, refusals that name the field."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import Request

from pd_common.control.convert_generation import DEFAULT_BOOTSTRAP_PORT, MAX_RID
from pd_common.errors import InvalidRequest
from pd_common.types import MAX_ROOM, BootstrapAddress, BootstrapRoom
from services.router.backend import Backend
from services.router.http_errors import Problem, RequestRefused

MAX_BODY_BYTES = 32 * 2**20
_UINT32_END = 2**32
_UINT64_END = 2**64


def only(*neutral: object) -> AfterValidator:
    """A field of the API that has no effect here: accepted at a value that asks for nothing, refused at any other."""

    def check(value: object) -> object:
        if value in neutral:
            return value
        hint = f", only {json.dumps(neutral[0])} is" if neutral else ""
        raise PydanticCustomError("not_supported", "this is not supported{hint}", {"hint": hint})

    return AfterValidator(check)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def refuse_batch(value: object) -> object:
    """A list of texts or of lists is more than one prompt."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        raise PydanticCustomError("batch", "more than one prompt in a request is not supported")
    return value


Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID)]
Room = Annotated[int, Field(ge=1, le=MAX_ROOM)]
Absent = Annotated[object, only()]
Count = Annotated[int, Field(ge=1, lt=_UINT32_END)]
TokenId = Annotated[int, Field(ge=0, lt=_UINT32_END)]
MinTokens = Annotated[int, Field(ge=0, lt=_UINT32_END)]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=_UINT32_END), AfterValidator(lambda k: max(k, 0))]
"""-1 and 0 both mean: from all tokens."""
Seed = Annotated[int, Field(ge=-(2**63), lt=_UINT64_END), AfterValidator(lambda seed: seed % _UINT64_END)]
"""A signed seed is taken by its 64 bits."""
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Stop = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)]


class Body(BaseModel):
    """A JSON object without unknown fields; a known field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class GenerationBody(Body):
    """What a request may say about itself and its meeting place, in every API."""

    rid: Rid | None = None
    bootstrap_host: Annotated[str, Field(min_length=1)] | None = None
    bootstrap_port: Annotated[int, Field(ge=1, lt=2**16)] | None = None
    bootstrap_room: Room | None = None
    stream: bool = False
    cache_salt: str = ""
    priority: Priority = 0
    """Larger is more urgent: served first, and where too many wait refused last."""

    def salt(self) -> bytes:
        return self.cache_salt.encode()

    def room(self) -> BootstrapRoom | None:
        return None if self.bootstrap_room is None else BootstrapRoom(self.bootstrap_room)

    def bootstrap(self) -> BootstrapAddress | None:
        if self.bootstrap_host is not None:
            return BootstrapAddress(self.bootstrap_host, self.bootstrap_port or DEFAULT_BOOTSTRAP_PORT)
        if self.bootstrap_port is not None:
            raise InvalidRequest("bootstrap_port: needs a bootstrap_host", field="bootstrap_port")
        return None


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        RequestRefused: it is larger than MAX_BODY_BYTES.
        ClientDisconnect: the client went away before its end.

    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            raise RequestRefused(Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message))
    return bytes(body)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(model: type[AnyBody], raw: bytes) -> AnyBody:
    """The body as `model`.

    Raises:
        InvalidRequest: it is not JSON; a field is unknown, missing, of the wrong type, out of range or not supported.

    """
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from error


_CLEARER = {"extra_forbidden": "there is no such field", "model_type": "must be a JSON object"}


def _refusal(error: ErrorDetails) -> InvalidRequest:
    field = ".".join(str(part) for part in error["loc"])
    message = _CLEARER.get(error["type"], error["msg"])
    return InvalidRequest(f"{field}: {message}", field=field) if field else InvalidRequest(f"the body {message}")


async def prompt_of(text_or_ids: str | list[int], backend: Backend) -> tuple[int, ...]:
    """Token ids of a prompt. An empty text has none: a tokenizer's own first token does not make it a prompt."""
    if isinstance(text_or_ids, list):
        return tuple(text_or_ids)
    return await backend.tokenize_text(text_or_ids) if text_or_ids else ()
