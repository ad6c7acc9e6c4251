"""Asks the base model and the example adapters at once, with the official OpenAI SDK, and prints the answers side by
side: `python examples/openai_client.py [--base-url URL] [--prompt TEXT]`. Needs `pip install openai`. The key, where
the server asks for one, is that of the variable OPENAI_API_KEY, or else PUNICA_API_KEY.

The server computes all of these answers in the same batches. One of them is streamed to the screen as it is made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import textwrap
from collections.abc import Awaitable, Sequence

from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types import Model

TEXT_WIDTH = 92
PROMPT = "Hello, Greta here. Can I get nine sleeping bags delivered to Tunis?"
KEYS = ("OPENAI_API_KEY", "PUNICA_API_KEY")
ELSEWHERE = "The address of another server: --base-url http://127.0.0.1:PORT/v1"


async def ask(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> str:
    """The whole answer of one model."""
    done = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0
    )
    return done.choices[0].message.content or ""


async def stream(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> str:
    """The answer of one model, printed piece by piece while it is made."""
    pieces: list[str] = []
    chunks = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0, stream=True
    )
    print(f"{model} (streamed): ", end="", flush=True)
    async for chunk in chunks:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            pieces.append(piece)
            print(piece, end="", flush=True)
    print("\n")
    return "".join(pieces)


async def or_refusal(answer: Awaitable[str]) -> str:
    """The answer, or why there is none: an adapter that cannot be served hides no other's answer."""
    try:
        return await answer
    except APIStatusError as error:
        return f"({error})"


def table(names: Sequence[str], answers: Sequence[str]) -> str:
    """Names on the left, wrapped answers on the right."""
    width = max(map(len, names))
    lines: list[str] = []
    for name, answer in zip(names, answers, strict=True):
        wrapped = textwrap.wrap(" ".join(answer.split()), TEXT_WIDTH) or [""]
        lines += [f"{'' if i else name:<{width}} │ {text}" for i, text in enumerate(wrapped)]
        lines.append("─" * width + "─┼─" + "─" * TEXT_WIDTH)
    return "\n".join(lines[:-1])


def base_first(models: Sequence[Model]) -> list[str]:
    """Ids of the models; the base is the one without a parent."""
    return [m.id for m in sorted(models, key=lambda m: (getattr(m, "parent", None) is not None, m.id))]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    try:
        await compare(args.base_url, args.prompt, args.max_tokens)
    except APIConnectionError:
        raise SystemExit(f"{args.base_url} does not answer. {ELSEWHERE}") from None
    except APIStatusError as error:
        key = f" Its key is read from the variable {' or else '.join(KEYS)}." if error.status_code == 401 else ""
        raise SystemExit(f"{args.base_url} refuses: {str(error).removesuffix('.')}.{key} {ELSEWHERE}") from None


async def compare(base_url: str, prompt: str, max_tokens: int) -> None:
    """Asks all models of the server at once and prints their answers. Raises what the SDK does if it has no list."""
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "none")
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        names = base_first([model async for model in client.models.list()])
        print(f"> {prompt}\n")
        streamed = or_refusal(stream(client, names[-1], prompt, max_tokens))
        others = [or_refusal(ask(client, name, prompt, max_tokens)) for name in names[:-1]]
        last, *rest = await asyncio.gather(streamed, *others)
    print(table(names, [*rest, last]))


if __name__ == "__main__":
    asyncio.run(main())
