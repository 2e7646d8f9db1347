"""Greedy answers of a Llama-family target to very many prompts on one GPU.

    python scripts/bulk_answers.py TARGET_FOLDER PROMPTS.jsonl OUT_FOLDER

`dflash prepare` answers through Transformers, sorted and padded, whatever the architecture. This script is for the one
case where a GPU has minutes for tens of thousands of prompts: a slot per sequence, in which a finished sequence makes
room for the next prompt at once, and each step is one captured graph. It writes files that `dflash train` reads.
PROMPTS.jsonl: one JSON list of token ids per line, the chat template applied.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

STEPS_PER_LOOK = 16
"""Steps between looks at which sequences are finished; each look waits for the device."""


@dataclass(frozen=True)
class Shape:
    """What of a Llama configuration the forward pass needs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    eps: float

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """From the folder's config.json."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            theta=float(rope["rope_theta"]),
            eps=config["rms_norm_eps"],
        )


class SlotDecoder:
    """Greedy decoding of N slots with keys and values of fixed length L."""

    def __init__(
        self, weights: dict[str, Tensor], shape: Shape, *, slots: int, length: int, most_new: int, device: str
    ) -> None:
        some = weights["model.embed_tokens.weight"]
        self.weights, self.shape, self.length, self.most_new = weights, shape, length, most_new
        size = (shape.num_layers, slots, shape.num_kv_heads, length, shape.head_dim)
        self.keys, self.values = (torch.zeros(size, device=device, dtype=some.dtype) for _ in range(2))
        inverse = shape.theta ** -(torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
        angles = torch.arange(length, device=device).float()[:, None] * inverse
        self.cos, self.sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        self.tokens, self.positions, self.counts = (
            torch.zeros(slots, dtype=torch.long, device=device) for _ in range(3)
        )
        self.answers = torch.zeros(slots, most_new + STEPS_PER_LOOK, dtype=torch.long, device=device)
        self.rows, self.columns = torch.arange(slots, device=device), torch.arange(length, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.startswith("cuda"):
            self._capture()

    def step(self) -> None:
        """One token for every slot."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def admit(self, slots: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill prompts into free slots [M], and their first token."""
        width = max(map(len, prompts))
        ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=slots.device)
        ends = torch.tensor([len(p) for p in prompts], device=slots.device)
        cos, sin = self.cos[None, None, :width], self.sin[None, None, :width]
        x = self.weights["model.embed_tokens.weight"][ids]
        for number in range(self.shape.num_layers):
            q, k, v = self._project(x, number, cos, sin)
            self.keys[number, slots, :, :width], self.values[number, slots, :, :width] = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(x, mixed, number)
        first = self._next(x[torch.arange(len(prompts), device=slots.device), ends - 1])
        self.tokens[slots], self.positions[slots], self.counts[slots] = first, ends, 1
        self.answers[slots, 0] = first

    def _step(self) -> None:
        n = len(self.rows)
        cos, sin = self.cos[self.positions][:, None, None], self.sin[self.positions][:, None, None]
        # A group of query heads becomes the rows of one query, so that keys and values are read once.
        hidden = (self.columns > self.positions[:, None])[:, None, None]
        bias = torch.zeros(hidden.shape, device=hidden.device, dtype=self.keys.dtype).masked_fill(hidden, -torch.inf)
        x = self.weights["model.embed_tokens.weight"][self.tokens][:, None]
        for number in range(self.shape.num_layers):
            q, k, v = self._project(x, number, cos, sin)
            self.keys[number, self.rows, :, self.positions] = k[:, :, 0]
            self.values[number, self.rows, :, self.positions] = v[:, :, 0]
            grouped = q.reshape(n, self.shape.num_kv_heads, -1, self.shape.head_dim)
            scores = grouped * self.shape.head_dim**-0.5 @ self.keys[number].transpose(-1, -2) + bias
            mixed = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ self.values[number]
            x = self._finish(x, mixed.reshape(n, self.shape.num_heads, 1, self.shape.head_dim), number)
        self.tokens.copy_(self._next(x[:, 0]))
        self.answers[self.rows, self.counts.clamp(max=self.answers.shape[1] - 1)] = self.tokens
        self.positions.add_(1).clamp_(max=self.length - 1)
        self.counts.add_(1)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph

    def _project(self, x: Tensor, number: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Q, S, D], keys and values [N, K, S, D]."""
        u = self._norm(x, f"model.layers.{number}.input_layernorm.weight")
        out = []
        for name in "qkv":
            rows = F.linear(u, self.weights[f"model.layers.{number}.self_attn.{name}_proj.weight"])
            heads = rows.view(*rows.shape[:2], -1, self.shape.head_dim).transpose(1, 2)
            out.append(heads if name == "v" else _rotate(heads, cos, sin))
        return out[0], out[1], out[2]

    def _finish(self, x: Tensor, mixed: Tensor, number: int) -> Tensor:
        prefix = f"model.layers.{number}."
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.weights[prefix + "self_attn.o_proj.weight"])
        u = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(u, self.weights[prefix + "mlp.gate_proj.weight"]))
        return x + F.linear(gate * F.linear(u, self.weights[prefix + "mlp.up_proj.weight"]),
                            self.weights[prefix + "mlp.down_proj.weight"])  # fmt: skip

    def _next(self, x_NH: Tensor) -> Tensor:
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(self._norm(x_NH, "model.norm.weight"), head).argmax(-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        return weight * F.rms_norm(x.float(), weight.shape, eps=self.shape.eps).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


@torch.inference_mode()
def answers(
    decoder: SlotDecoder, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], *, deadline: float
) -> Iterator[tuple[int, list[int]]]:
    """(prompt number, answer through its stop token) as they finish.

    After `deadline` (time.perf_counter) no prompt is begun."""
    waiting = list(range(len(prompts)))[::-1]
    owner: dict[int, int] = {}
    free = decoder.rows.tolist()
    stops = torch.tensor(sorted(stop_ids), device=decoder.tokens.device)
    while owner or waiting:
        if time.perf_counter() > deadline:
            waiting = []
        taken = [waiting.pop() for _ in range(min(len(free), len(waiting)))]
        for begin in range(0, len(taken), 512):
            part = taken[begin : begin + 512]
            slots = [free.pop() for _ in part]
            owner.update(zip(slots, part, strict=True))
            decoder.admit(torch.tensor(slots, device=decoder.rows.device), [prompts[i] for i in part])
        for _ in range(STEPS_PER_LOOK):
            decoder.step()
        ended = torch.isin(decoder.answers, stops)
        ended &= torch.arange(ended.shape[1], device=ended.device) < decoder.counts[:, None]
        done = (ended.any(-1) | (decoder.counts >= decoder.most_new)).tolist()
        finished = [slot for slot in owner if done[slot]]
        rows = decoder.answers[torch.tensor(finished, dtype=torch.long, device=decoder.rows.device)].tolist()
        for slot, row in zip(finished, rows, strict=True):
            row = row[: decoder.most_new]
            end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
            yield owner.pop(slot), row[:end]
            free.append(slot)


def main() -> None:
    """Parse the command line, answer, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no new prompt after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    begun = time.perf_counter()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    files = sorted(options.target.glob("*.safetensors"))
    weights = {name: t.to(options.device, dtype) for file in files for name, t in load_file(file).items()}
    ends = json.loads((options.target / "generation_config.json").read_text())["eos_token_id"]
    stop_ids = frozenset([ends] if isinstance(ends, int) else ends)
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()[: options.limit]]
    numbers = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    options.out.mkdir(parents=True, exist_ok=True)
    total = written = 0
    with (options.out / "answers-00000.jsonl").open("w") as file:
        # Short prompts first, with less room per slot: attention reads all of it.
        half = next((at for at, i in enumerate(numbers) if len(prompts[i]) > 96), len(numbers))
        for group in (numbers[:half], numbers[half:]):
            if not group or time.perf_counter() - begun > options.seconds:
                continue
            length = (len(prompts[group[-1]]) + options.max_new_tokens + STEPS_PER_LOOK + 7) // 8 * 8
            decoder = SlotDecoder(
                weights, Shape.of(options.target), slots=min(options.slots, len(group)), length=length,
                most_new=options.max_new_tokens, device=options.device,
            )  # fmt: skip
            for place, answer in answers(
                decoder, [prompts[i] for i in group], stop_ids, deadline=begun + options.seconds
            ):
                prompt = prompts[group[place]]
                row = {"id": f"bulk/{group[place]}", "source": "bulk", "prompt_ids": prompt, "answer_ids": answer}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                total, written = total + len(answer), written + 1
            seconds = time.perf_counter() - begun
            print(f"{written} answers, {total} tokens, {seconds:.1f} s, {total / seconds:.0f} tokens/s", flush=True)
            del decoder


if __name__ == "__main__":
    main()
