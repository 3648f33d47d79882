"""Serve a quantised model over HTTP, its tokens streamed as they come.

``python examples/serve_model.py FOLDER [port]``, FOLDER being what `gemmule quantize` or
``save_pretrained`` wrote, with its tokeniser. Then:

    curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Once"}'
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import gemmule.torch  # noqa: F401  transformers then knows the model's layers


class Request(BaseModel):
    """What a client sends."""

    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(64, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0.0, le=4.0)


def make_app(folder: str) -> FastAPI:
    """Load a model and return the application that serves it, one request at a time."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=where)
    app, one_at_a_time = FastAPI(), threading.Lock()

    def tokens(request: Request, given: torch.Tensor) -> Iterator[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        drawn = {"do_sample": True, "temperature": request.temperature}
        options: dict[str, Any] = drawn if request.temperature else {"do_sample": False}
        options |= {"max_new_tokens": request.max_new_tokens, "streamer": streamer}

        def work() -> None:
            try:
                model.generate(input_ids=given, **options)
            finally:
                streamer.end()  # after an error too: the client waits for it

        with one_at_a_time:
            worker = threading.Thread(target=work, daemon=True)
            worker.start()
            yield from streamer
            worker.join()

    @app.post("/generate")
    def generate(request: Request) -> StreamingResponse:
        given = tokenizer(request.prompt, return_tensors="pt")["input_ids"]
        if given.numel() == 0:  # of spaces, say
            raise HTTPException(422, "the prompt holds no token; send some words")
        return StreamingResponse(tokens(request, given.to(where)), media_type="text/plain")

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1]), port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
