"""POST /tokenize and /detokenize, in vLLM's shapes: what a model's prompt is as ids, and back."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.access import caller
from app.api_errors import error_response
from app.body import Body
from app.generation import chat_text, check_ids, fitting_ids, off_loop_if_large
from app.keys import ApiKey
from app.openapi import answered_by
from app.responses import DetokenizeResponse, TokenizeResponse
from app.schemas import BodyT, DetokenizeRequest, TokenizeRequest, parse
from app.service import Service
from app.template_processes import AdapterTemplate
from punica_core.errors import PunicaError
from punica_core.protocol import AdapterRef

router = APIRouter()


@router.post("/tokenize", response_model=None, openapi_extra=answered_by(TokenizeResponse, body=TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """A prompt's or a conversation's token ids, as a generation would have them."""
    service: Service = request.app.state.service
    with service.bodies.begin() as held:
        try:
            body = await _read(request, service, held, TokenizeRequest)
            template = await service.template_of(await _adapter(service, body.model, caller(request)))
            field, text, special = await _text(body, service, template)
            strings = bool(body.return_token_strs)
            answer = await off_loop_if_large(
                len(text), lambda: _tokenized(text, field, service, special=special, with_strings=strings)
            )
        except PunicaError as error:
            return error_response(error)
    return Response(answer, media_type="application/json")


@router.post("/detokenize", response_model=None, openapi_extra=answered_by(DetokenizeResponse, body=DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    with service.bodies.begin() as held:
        try:
            body = await _read(request, service, held, DetokenizeRequest)
            await _adapter(service, body.model, caller(request))
            check_ids(body.tokens, tokenizer.vocab_size, "tokens")
            text = await off_loop_if_large(
                len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
            )
        except PunicaError as error:
            return error_response(error)
    return Response(msgspec.json.encode(DetokenizeResponse(prompt=text)), media_type="application/json")


async def _read(request: Request, service: Service, held: Body, kind: type[BodyT]) -> BodyT:
    return parse(kind, await held.read(request, service.settings.max_body_bytes), service.note_unknown)


async def _adapter(service: Service, model: str | None, key: ApiKey) -> AdapterRef | None:
    return None if model is None else await service.resolve(model, key)


def _tokenized(text: str, field: str, service: Service, *, special: bool, with_strings: bool) -> bytes:
    tokenizer, length = service.tokenizer, service.layout.max_model_len
    ids = fitting_ids(text, tokenizer, length, field, add_special_tokens=special)
    strings = [tokenizer.token_string(token) for token in ids] if with_strings else None
    return msgspec.json.encode(TokenizeResponse(len(ids), length, ids, strings))


async def _text(body: TokenizeRequest, service: Service, template: AdapterTemplate | None) -> tuple[str, str, bool]:
    """The field that holds the prompt, its text, and whether that gets special tokens."""
    if body.messages is None:
        return "prompt", body.prompt or "", body.add_special_tokens is not False
    text = await chat_text(body, body.messages, service.tokenizer, template, body.model or service.base_name)
    return "messages", text, bool(body.add_special_tokens)
