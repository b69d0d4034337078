"""A small HTTP server that serves a tiny model with the embedded engine, with OpenAI's completions API or SGLang's
API."""

import asyncio
import json
import threading

import numpy as np
import torch
from aiohttp import web
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid.types import GenerateRequest, SamplingParams
from plasmid_models.building import BUILD_LOCK
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_runtime.cluster.local import LocalCluster
from transformers import AutoModelForCausalLM


class ModelServer:
    """Serves from a thread until `close`. ``faults`` are status codes for the next responses."""

    def __init__(self, model, plain, *, sglang=False, logprobs=True):
        self.faults, self.bodies, self.headers = [], [], []
        self.refuse = ""
        self.change = lambda answer: answer  # changes responses with log-probabilities of given tokens
        self._scorer = None
        self.delay_s = 0.0
        self._model, self._plain = model, plain
        self._sglang, self._logprobs = sglang, logprobs
        self._count = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(120)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self):
        config = resolve({**self._plain, "model": {"path": str(self._model)}, "eval": []})
        self._cluster = LocalCluster()
        self._engine = await config.rollout.build(
            BuildContext(cluster=self._cluster, config=config, run_dir=self._model, bundles=(Bundle(),))
        )
        self._tokenizer = Tokenizer(self._model)
        self.encode = lambda text: self._tokenizer.encode(text).tolist()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        if self._sglang:
            app.router.add_get("/get_model_info", self._models)
            app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    def close(self):
        async def stop():
            await self._runner.cleanup()
            await self._cluster.close()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _models(self, request):
        self.headers.append(dict(request.headers))
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _body(self, request):
        """Return the JSON of the request, or the error response."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.delay_s)
        if self.faults:
            raise _error(self.faults.pop(0))
        if self.refuse and self.refuse in json.dumps(body):
            raise _error(400)
        return body

    async def _draw(self, ids, **sampling):
        self._count += 1
        name = f"http-{self._count}"
        request = GenerateRequest(
            id=name, session_id=name, token_ids=np.asarray(ids, np.int32), sampling=SamplingParams(**sampling), seed=7
        )
        completion = await self._engine.client.generate(request)
        await self._engine.client.end_sessions([name])
        return completion

    async def _tokenize(self, request):
        body = await request.json()
        return web.json_response({"tokens": self.encode(body["prompt"])} if self.encode else {})

    def score(self, ids):
        """Return log-probabilities of all tokens except the first, at temperature 1."""
        return self.distributions(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def top(self, ids, count):
        """Return the most likely tokens at all positions except the first: lists of [log-probability, token, text]."""
        found = self.distributions(ids).topk(count, dim=-1)
        rows = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        return [[[value, token, None] for value, token in zip(*row, strict=True)] for row in rows]

    def distributions(self, ids):
        """Return log-probabilities of the vocabulary after each token except the last."""
        with BUILD_LOCK:  # a run in this process may load models meanwhile
            self._scorer = self._scorer or AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32).eval()
        with torch.no_grad():
            return self._scorer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    async def _completions(self, request):
        body = await self._body(request)
        if "prompt_logprobs" in body:
            scored = zip(body["prompt"][1:], self.score(body["prompt"]), strict=True)
            rows = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in scored)]
            for row, top in zip(rows[1:], self.top(body["prompt"], body["prompt_logprobs"]), strict=True):
                row |= {str(token): {"logprob": value, "rank": rank} for rank, (value, token, _) in enumerate(top, 1)}
            return web.json_response(self.change({"choices": [{"text": "x", "prompt_logprobs": rows}]}))
        prompt = body["prompt"]
        ids = self._tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
        drawn = await self._draw(
            ids, temperature=body["temperature"], max_new_tokens=body["max_tokens"], stop=tuple(body.get("stop", ()))
        )
        choice = {"text": self._tokenizer.decode(drawn.token_ids), "finish_reason": drawn.stop_reason.value}
        if self._logprobs:
            choice["logprobs"] = {"token_logprobs": drawn.logprobs.tolist()}
        return web.json_response({"choices": [choice]})

    async def _generate(self, request):
        body = await self._body(request)
        settings = body["sampling_params"]
        if settings["max_new_tokens"] == 0:
            ids, first = body["input_ids"], body["logprob_start_len"]
            rows = [[value, token, None] for token, value in zip(ids, [None, *self.score(ids)], strict=True)][first:]
            rows[0][0] = None
            meta = {"input_token_logprobs": rows}
            if count := body.get("top_logprobs_num", 0):
                meta["input_top_logprobs"] = [None, *self.top(ids, count)][first:]
                meta["input_top_logprobs"][0] = None
            return web.json_response(self.change({"text": "", "meta_info": meta}))
        drawn = await self._draw(
            body["input_ids"], temperature=settings["temperature"], max_new_tokens=settings["max_new_tokens"]
        )
        pairs = [[lp, token, None] for lp, token in zip(drawn.logprobs.tolist(), drawn.token_ids.tolist(), strict=True)]
        meta = {"output_token_logprobs": pairs, "finish_reason": {"type": drawn.stop_reason.value}}
        return web.json_response({"text": "", "output_ids": drawn.token_ids.tolist(), "meta_info": meta})


def _error(status):
    classes = {400: web.HTTPBadRequest, 503: web.HTTPServiceUnavailable, 429: web.HTTPTooManyRequests}
    return classes[status](text=json.dumps({"error": {"message": "no"}}))
