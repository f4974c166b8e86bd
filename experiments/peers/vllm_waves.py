#!/usr/bin/env python3
"""vLLM's own engine behind a plain front: POST /v1/completions, whole waves at a time.

usage: vllm_waves.py MODEL PORT IMPOSTERS [--old-rule] [--mamba-ssm-cache-dtype DTYPE]

vLLM's server hands requests to its engine one by one while the engine already computes, so that which
request gets which part of a step's budget is luck. This front waits until no request has come for a
while, queues all of them in the order of their names, and only then lets the engine run; nothing of
the engine is changed. It answers what gapscope asks and no more: one prompt of token ids, one choice,
the sampled tokens' log-probabilities, prompt_logprobs.

With --old-rule the engine sorts and splits its batches as vLLM did before PR 32118: a request with one
scheduled token counts as a decode, also where that token is its first. Either way the names of
requests that begin with a chunk of one token are written to the file IMPOSTERS, a line each.

Needs a vLLM of about 0.25 on a GPU, and nothing beside it."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The engine within this process, so that its rules can be changed here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

ENGINE = dict(
    dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
    enable_prefix_caching=False, gpu_memory_utilization=0.5, num_gpu_blocks_override=2600,
    max_model_len=2048, max_num_seqs=1024, max_num_batched_tokens=128 * 128 + 1, seed=0,
    disable_log_stats=True)
# A wave is complete when nothing has come for so long.
QUIET_S = 0.25


def watch_batches(path: str, old_rule: bool) -> None:
    """Notes first chunks of one token; under the old rule has them taken for decodes."""
    from vllm.v1.attention.backends import mamba_attn
    from vllm.v1.worker import gpu_model_runner

    reorder_now = gpu_model_runner.reorder_batch_to_split_decodes_and_prefills
    split_now = mamba_attn.split_decodes_and_prefills
    notes = open(path, "a", buffering=1)

    def reorder(batch, scheduler_output, decode_threshold=1):
        names = list(batch.req_ids)
        scheduled = [scheduler_output.num_scheduled_tokens[name] for name in names]
        computed = [int(count) for count in batch.num_computed_tokens_cpu[:len(names)]]
        for name, tokens, before in zip(names, scheduled, computed):
            if tokens == 1 and before == 0:
                notes.write(name + "\n")
        if not old_rule:
            return reorder_now(batch, scheduler_output, decode_threshold=decode_threshold)

        # Decodes, then prompts that go on, then prompts that begin; by scheduled tokens alone.
        def region(tokens: int, before: int) -> int:
            return 0 if tokens <= decode_threshold else 1 if before > 0 else 2

        regions = [region(*row) for row in zip(scheduled, computed)]
        moved = False
        for here in range(len(regions)):
            there = min(range(here, len(regions)), key=lambda row: (regions[row], row))
            if regions[there] < regions[here]:
                batch.swap_states(here, there)
                regions[here], regions[there] = regions[there], regions[here]
                moved = True
        return moved

    def split(metadata, **options):
        if old_rule:
            options["treat_short_extends_as_decodes"] = True
        return split_now(metadata, **options)

    gpu_model_runner.reorder_batch_to_split_decodes_and_prefills = reorder
    mamba_attn.split_decodes_and_prefills = split


class Waves:
    """Requests, gathered; answers, as each wave ends."""

    def __init__(self, model: str, **more: str) -> None:
        import vllm

        self.version = vllm.__version__
        self.params = vllm.SamplingParams
        self.engine = vllm.LLM(model=model, **ENGINE, **more).llm_engine
        self.coming: queue.Queue = queue.Queue()
        self.count = 0

    def ask(self, body: dict) -> dict:
        answer: Future = Future()
        self.coming.put((body, answer))
        return answer.result()

    def run(self) -> None:
        while True:
            wave = [self.coming.get()]
            try:
                while True:
                    wave.append(self.coming.get(timeout=QUIET_S))
            except queue.Empty:
                pass
            try:
                self.compute(sorted(wave, key=lambda one: by_name(one[0]["request_id"])))
            except BaseException as error:
                for _, answer in wave:
                    if not answer.done():
                        answer.set_exception(error)
                raise

    def compute(self, wave: list) -> None:
        waiting = {}
        for body, answer in wave:
            self.count += 1
            name = f"{body['request_id']}.{self.count}"
            waiting[name] = (body, answer)
            self.engine.add_request(name, {"prompt_token_ids": body["prompt"]}, self.sampling(body))
        while self.engine.has_unfinished_requests():
            for done in self.engine.step():
                if done.finished:
                    body, answer = waiting.pop(done.request_id)
                    answer.set_result(completion(body, done))

    def sampling(self, body: dict):
        return self.params(
            max_tokens=body["max_tokens"], temperature=body["temperature"], top_p=body["top_p"],
            top_k=body["top_k"], min_p=body["min_p"], ignore_eos=body["ignore_eos"],
            stop_token_ids=body["stop_token_ids"], seed=body.get("seed"), detokenize=False,
            logprobs=body["logprobs"], prompt_logprobs=body.get("prompt_logprobs"))


def by_name(name: str) -> list:
    """s2.p10.r0 after s2.p9.r1."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def completion(body: dict, done) -> dict:
    sampled = done.outputs[0]
    ids = list(sampled.token_ids)
    top = [{f"token_id:{token}": value.logprob for token, value in place.items()}
           for place in sampled.logprobs]
    prompt = done.prompt_logprobs
    if prompt is not None:
        prompt = [place and {str(token): {"logprob": value.logprob} for token, value in place.items()}
                  for place in prompt]
    return {"id": done.request_id, "choices": [{
        "index": 0, "text": "", "finish_reason": sampled.finish_reason, "token_ids": ids,
        "prompt_token_ids": body["prompt"], "prompt_logprobs": prompt,
        "logprobs": {"tokens": [f"token_id:{token}" for token in ids], "top_logprobs": top,
                     "token_logprobs": [place[f"token_id:{token}"] for place, token in zip(top, ids)]},
    }]}


def front(waves: Waves, model: str) -> type:
    class Front(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer({"data": [{"id": "hybrid", "root": model,
                                       "max_model_len": ENGINE["max_model_len"]}]})
            elif self.path == "/version":
                self.answer({"version": waves.version})
            elif self.path == "/health":
                self.answer({})
            else:
                self.answer({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self.answer(waves.ask(body))
            except Exception as error:
                self.answer({"error": {"message": repr(error)}}, 500)

        def answer(self, value: dict, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Front


class Server(ThreadingHTTPServer):
    # A whole wave may knock at once.
    request_queue_size = 2048
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("imposters")
    parser.add_argument("--old-rule", action="store_true")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
    asked = parser.parse_args()
    watch_batches(asked.imposters, asked.old_rule)
    waves = Waves(asked.model, mamba_ssm_cache_dtype=asked.mamba_ssm_cache_dtype)
    server = Server(("127.0.0.1", asked.port), front(waves, asked.model))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The engine stays in the thread that made it.
    waves.run()


if __name__ == "__main__":
    main()
