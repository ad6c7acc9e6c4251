"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.access import caller
from app.api_errors import error_response
from app.budget import Share
from app.flight import Flight, SequenceStream
from app.formats import ChatFormat, CompletionFormat, Format
from app.generation import Job, chat_job, completion_job
from app.metrics import ModelMetrics
from app.openapi import answered_by
from app.output_text import OutputText
from app.responses import ChatCompletion, Completion
from app.schemas import BodyT, ChatRequest, CompletionRequest, GenerationRequest, parse
from app.service import Service
from app.streaming import GenerationResponse
from punica_core.errors import ModelNotFound, PunicaError, QueueFull
from punica_core.protocol import AdapterRef

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=None,
    openapi_extra=answered_by(ChatCompletion, body=ChatRequest, streams=True),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    with Admission(request) as admission:
        try:
            body = await admission.read(ChatRequest)
            adapter = await admission.resolve(body)
            service = admission.service
            template = await service.template_of(adapter)
            job = await chat_job(body, service.tokenizer, service.layout.max_model_len, template)
            flight = admission.open(body, job, adapter)
        except PunicaError as error:
            return admission.refuse(error)
        answer = ChatFormat(service.tokenizer, with_logprobs=bool(body.logprobs), prompt_logprobs=body.prompt_logprobs)
        outputs = admission.outputs(body, flight, lambda sequence: ())
        return admission.response("chatcmpl", body, job, flight, outputs, answer)


@router.post(
    "/v1/completions",
    response_model=None,
    openapi_extra=answered_by(Completion, body=CompletionRequest, streams=True),
)
async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    with Admission(request) as admission:
        try:
            body = await admission.read(CompletionRequest)
            adapter = await admission.resolve(body)
            job = await completion_job(body, admission.service.tokenizer, admission.service.layout.max_model_len)
            flight = admission.open(body, job, adapter)
        except PunicaError as error:
            return admission.refuse(error)
        outputs = admission.outputs(body, flight, lambda sequence: sequence.request.prompt_ids)
        answer = CompletionFormat(
            admission.service.tokenizer,
            job,
            outputs,
            echo=bool(body.echo),
            alternatives=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        return admission.response("cmpl", body, job, flight, outputs, answer)


class Admission:
    """One request on its way in. Counts it under its model whatever becomes of it; ends what it began if it fails."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self._request = request
        self._key = caller(request)
        self._arrived_at = time.perf_counter()
        self._metrics: ModelMetrics = self.service.metrics.unknown
        self._body = self.service.bodies.begin()
        self._flight: Flight | None = None
        self._logprobs: Share | None = None

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._body.end()
        if kind is not None:
            self._end()

    def _end(self) -> None:
        if self._flight is not None:
            self._flight.close()
        if self._logprobs is not None:
            self._logprobs.end()

    async def read(self, kind: type[BodyT]) -> BodyT:
        """The request's body. Raises InvalidRequest, RequestTooLarge or QueueFull."""
        body = await self._body.read(self._request, self.service.settings.max_body_bytes)
        return parse(kind, body, self.service.note_unknown)

    async def resolve(self, body: GenerationRequest) -> AdapterRef | None:
        """The adapter asked for, None for the base. Raises ModelNotFound or AdapterError."""
        try:
            adapter = await self.service.resolve(body.model, self._key)
        except ModelNotFound:
            raise
        except PunicaError:
            self._metrics = self.service.metrics.model(body.model)
            raise
        self._metrics = self.service.metrics.model(body.model)
        return adapter

    def open(self, body: ChatRequest | CompletionRequest, job: Job, adapter: AdapterRef | None) -> Flight:
        """Hand the job to the batcher. Raises CapacityError; InvalidRequest for what the key may never use at once."""
        self._logprobs = self._share_of_logprobs(job.num_logprobs)
        prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)
        is_asked = isinstance(body, CompletionRequest) or body.output_limit is not None
        output_tokens = sum(request.sampling.max_tokens for request in job.requests) if is_asked else 0
        lease = self.service.usages.of(self._key).reserve(len(job.requests), prompt_tokens, output_tokens)
        try:
            flight = self._flight = self.service.batcher.open(
                job.requests,
                self._metrics,
                adapter=adapter,
                tenant=self._key.name,
                eager=bool(body.stream),
                arrived_at=self._arrived_at,
                on_end=lambda generated_tokens: lease.end(prompt_tokens, generated_tokens),
                keep_logprobs=self._logprobs.spend,
            )
        except BaseException:
            lease.end(0, 0)
            raise
        self._metrics.prompt_tokens += prompt_tokens
        return flight

    def _share_of_logprobs(self, amount: int) -> Share:
        budget = self.service.logprobs
        share = budget.take(amount)
        if share is None:
            raise QueueFull(
                f"Unfinished requests may be given {budget.used} logprobs and {amount} more would exceed the limit of "
                f"{budget.capacity}. Try again later, or ask for fewer alternatives or a lower max_tokens."
            )
        return share

    def outputs(
        self, body: GenerationRequest, flight: Flight, prompt_ids: Callable[[SequenceStream], list[int] | tuple[()]]
    ) -> list[OutputText]:
        """A reader for each sequence. prompt_ids: the prompt that the text continues, if it does."""
        skip_special = body.skip_special_tokens is not False
        return [
            OutputText(
                sequence,
                self.service.tokenizer.detokenizer(skip_special_tokens=skip_special, prompt_ids=prompt_ids(sequence)),
                stops=body.stop_strings,
                include_stop=bool(body.include_stop_str_in_output),
                list_stop_token=isinstance(body, CompletionRequest),
            )
            for sequence in flight.sequences
        ]

    def response(
        self,
        prefix: str,
        body: GenerationRequest,
        job: Job,
        flight: Flight,
        outputs: list[OutputText],
        answer: Format,
    ) -> GenerationResponse:
        """The response that reads the flight."""
        model = body.model  # of the body itself nothing is kept while the answer runs
        assert self._logprobs is not None
        return GenerationResponse(
            flight,
            job,
            outputs,
            answer,
            head=lambda adapter_key: self.service.head(prefix, model, adapter_key),
            stream=bool(body.stream),
            include_usage=body.include_usage,
            keep_alive=self.service.settings.stream_keep_alive,
            retry_after=lambda: self.service.supervisor.retry_after,
            on_end=self._logprobs.end,
        )

    def refuse(self, error: PunicaError) -> Response:
        """The response for a request that was not admitted."""
        self._end()
        self._metrics.finish(error.code, time.perf_counter() - self._arrived_at)
        return error_response(error, retry_after=self.service.supervisor.retry_after)
