"""Train one variant of the lookup model (README.md tells the recipe and why).

    python -m experiments.lookup_model.train agreeing --work /tmp/agreeing

Resumes from `--work` when it holds a state. Writes a checkpoint transformers can load with --out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common import Unable, parser_of
from experiments.lookup_model.batches import Batch, stream
from experiments.lookup_model.llama import LookupLlama
from experiments.lookup_model.model import LookupOPT, Shape, Trace, hint_log_mass
from experiments.lookup_model.muon import Muon
from impress.demo.lookup.tasks import TASKS
from impress.demo.lookup.tokenizer import N_TOKENS

#: Curriculum: tokens of a document, questions of each task about it, share of the learning rate.
#: The lengths of a stage take turns, so that questions are learnt at many positions.
#: At a constant rate RTE, learnt first on 64 tokens, was forgotten again within 500 steps on 576.
STAGES = (
    ((64,), 12, 1.0),
    ((128,), 12, 0.7),
    ((256,), 16, 0.5),
    ((576,), 24, 0.35),
    ((1152,), 16, 0.25),
    ((2048, 1152, 576), 16, 0.2),
)
N_AUX_STAGES = 4
#: The heads hinted in the specialised variant, none of the first three. With head 5 alone COPA was
#: learnt and RTE still at chance after 720 steps; all eight heads take about 250.
SPECIALISTS = (4, 5, 6, 7)
#: Arguments that may differ when a run is resumed; with any other changed it is another run.
_MAY_DIFFER: Final = ("work", "out", "steps")


@dataclass
class Progress:
    """Where a run stands; saved with the weights."""

    step: int = 0
    stage: int = 0
    in_stage: int = 0
    next_document: int = 0
    n_tokens: int = 0
    hint: bool = True
    accuracy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TASKS, 0.4))
    seconds: float = 0.0


@dataclass(frozen=True)
class Losses:
    answer: Tensor
    aux: Tensor
    hint: Tensor
    entropy: Tensor  # of the lookup questions' attention, mean of layers, nats


def build(variant: str, n_layers: int, seed: int) -> LookupOPT | LookupLlama:
    """A fresh model: OPT, or for the variant `grouped` a Llama with 2 KV heads for 8 heads."""
    if variant == "grouped":
        return LookupLlama(Shape(n_words=N_TOKENS, n_layers=n_layers, n_kv_heads=2), seed)
    return LookupOPT(Shape(n_words=N_TOKENS, n_layers=n_layers), seed)


class Run:
    """One training run: model, optimizers, progress. Changes files under `work` only."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model = build(args.variant, args.layers, args.seed)
        hidden = self.model.shape.hidden
        self.aux = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.at = Progress()
        matrices, others, tables = [], [], []
        for name, p in self.model.named_parameters():
            if "embed_positions" in name:
                tables.append(p)
            elif p.ndim == 2 and "layers" in name:
                matrices.append(p)
            else:
                others.append(p)
        groups: list[dict[str, Any]] = [
            {"params": [*others, *self.aux.parameters()], "lr": 2e-3},
            {"params": tables, "lr": args.position_lr},
        ]
        self.optimizers = [
            Muon(matrices, lr=args.lr),
            torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._stopped = False
        self.base_lr = [[g["lr"] for g in o.param_groups] for o in self.optimizers]

    # --- one step

    def step(self, batch: Batch) -> Losses:
        self._set_rate()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trace = self.model(batch.tokens, batch.positions, batch.see)
        losses = self._losses(trace, batch)
        total = losses.answer + losses.aux + self.args.hint_weight * losses.hint
        if not self.at.hint:  # first find the fact, then let go of the rest
            total = total + self.args.entropy_weight * losses.entropy
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses

    def _set_rate(self) -> None:
        left = (self.args.steps - self.at.step) / self.args.steps
        factor = min(1.0, (self.at.step + 1) / 50, max(0.02, left / 0.3))
        factor *= STAGES[self.at.stage][2]
        for optimizer, bases in zip(self.optimizers, self.base_lr, strict=True):
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * factor

    def _losses(self, trace: Trace, batch: Batch) -> Losses:
        logits = self.model.logits(trace.final[batch.rows, batch.at].float())
        each = F.cross_entropy(logits, batch.answers, reduction="none")
        self._count(logits, batch)
        of_task = [each[batch.task == t] for t in range(len(TASKS))]
        answer = torch.stack([e.mean() for e in of_task if len(e)]).sum() / len(TASKS)
        zero = torch.zeros(())
        aux = self._previous_two(trace, batch) if self.at.stage < N_AUX_STAGES else zero
        hint = self._hint(trace, batch) if self.at.hint else zero
        entropy = torch.stack([look.entropy for look in trace.looks]).mean()
        return Losses(answer, aux, hint, entropy)

    def _previous_two(self, trace: Trace, batch: Batch) -> Tensor:
        """After layer 0 every document token and every answer position should name the two words
        before it."""
        x = F.layer_norm(trace.first, trace.first.shape[-1:])
        n = batch.see.n_document
        loss = torch.zeros(())
        for d, head in enumerate(self.aux, start=1):
            where = torch.cat([x[:, d:n].flatten(0, 1), x[batch.rows, batch.at]])
            before = [batch.tokens[:, : n - d].flatten(), batch.tokens[batch.rows, batch.at - d]]
            named = self.model.logits(head(where)).float()
            loss = loss + F.cross_entropy(named, torch.cat(before))
        return loss * float(self.args.aux_weight)

    def _hint(self, trace: Trace, batch: Batch) -> Tensor:
        """At answers, layer 1 should look at where the name was before."""
        some = batch.hinted.any(1).nonzero()[:, 0]
        log_mass = hint_log_mass(
            trace, batch.see, batch.rows[some], batch.at[some], batch.hinted[some]
        )
        if self.args.variant == "specialised":
            return -log_mass[:, SPECIALISTS].mean()
        return -log_mass.mean()

    # --- progress

    def _count(self, logits: Tensor, batch: Batch) -> None:
        chosen = batch.candidates.gather(1, logits.gather(1, batch.candidates).argmax(1)[:, None])
        right = (chosen[:, 0] == batch.answers).float()
        for t, task in enumerate(TASKS):
            of_task = right[batch.task == t]
            if len(of_task):
                self.at.accuracy[task] += 0.05 * (of_task.mean().item() - self.at.accuracy[task])

    def _advance(self) -> bool:
        """Turn the hint off, or go to the next stage; True when the stage changed."""
        at = self.at
        lookup = [at.accuracy["rte"], at.accuracy["copa"]]
        if at.hint and min(lookup) > self.args.hint_until:
            at.hint = False
            print(f"step {at.step}: hint off for good", flush=True)
        ready = min(lookup) > 0.9 and at.accuracy["diffuse"] > self.args.diffuse_bar
        if at.stage + 1 < len(STAGES) and ready and at.in_stage >= 40:
            at.stage, at.in_stage = at.stage + 1, 0
            at.accuracy = dict.fromkeys(TASKS, 0.5)
            return True
        return False

    def train(self) -> None:
        began = time.monotonic() - self.at.seconds
        batches = self._batches()
        while self.at.step < self.args.steps:
            self.at.next_document, batch = next(batches)
            losses = self.step(batch)
            self.at.step += 1
            self.at.in_stage += 1
            self.at.n_tokens += batch.tokens.numel()
            self.at.seconds = time.monotonic() - began
            if self.at.step % 20 == 0:
                self._log(losses)
            if self._advance():
                batches = self._batches()
                print(
                    f"step {self.at.step}: documents of {STAGES[self.at.stage][0][0]}", flush=True
                )
            if self.at.step % 200 == 0 or self.at.step == self.args.steps or self._stopped:
                self.save()
            if self._stopped:
                raise KeyboardInterrupt

    def stop(self, *_signal: object) -> None:
        """End `train` with KeyboardInterrupt once the step under way is whole, and kept."""
        self._stopped = True

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        lengths, n_each, _ = STAGES[self.at.stage]
        return stream(
            self.at.next_document,
            lengths,
            n_each,
            self.args.tokens_per_step,
            self.model.shape.max_positions,
            self.args.seed,
            self.at.in_stage,
        )

    def _log(self, losses: Losses) -> None:
        shown = " ".join(f"{t} {a:.3f}" for t, a in self.at.accuracy.items())
        print(
            f"step {self.at.step} len {STAGES[self.at.stage][0][0]} {self.at.seconds:.0f}s "
            f"{self.at.n_tokens / 1e6:.2f}Mtok loss {losses.answer.item():.3f} "
            f"aux {losses.aux.item():.3f} hint {losses.hint.item():.3f} "
            f"entropy {losses.entropy.item():.2f} | {shown}",
            flush=True,
        )

    # --- files

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "aux": self.aux.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": vars(self.at),
            "args": vars(self.args),
        }
        fresh = self.work / "state.tmp"
        torch.save(state, fresh)
        fresh.rename(self.work / "state.pt")

    def resume(self) -> None:
        """Go on from the state in `work`, if it has one. Raises Unable if it is another run's."""
        path = self.work / "state.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path)
        except (EOFError, RuntimeError, UnpicklingError):
            raise Unable(f"{path} is damaged: remove it, or name another --work") from None
        for name, asked in vars(self.args).items():
            of = state["args"].get(name)
            if name not in _MAY_DIFFER and of != asked:
                raise Unable(f"{path} is of {name} {of}, not {asked}: name another --work")
        done = state["progress"]["step"]
        if done > self.args.steps:
            raise Unable(f"{path} is at step {done}, beyond --steps: name another --work")
        self.model.load_state_dict(state["model"])
        self.aux.load_state_dict(state["aux"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.at = Progress(**state["progress"])
        print(f"resumed at {json.dumps(vars(self.at))}", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("lookup_model.train", __doc__)
    add = parser.add_argument
    add("variant", choices=("agreeing", "specialised", "grouped"), help="which checkpoint is made")
    add("--work", required=True, metavar="DIR", help="folder of the resumable state")
    add("--out", metavar="DIR", help="write the checkpoint here when done")
    for name, default, what in (
        ("steps", 1200, "of the whole run"),
        ("layers", 4, "of the model"),
        ("seed", 0, "of what is drawn"),
        ("lr", 0.02, "learning rate of the layers' matrices"),
        ("position-lr", 0.0, "learning rate of the table of positions"),
        ("tokens-per-step", 3000, "of a batch, about"),
        ("hint-weight", 0.3, "of the hint in the loss"),
        ("hint-until", 0.6, "accuracy of both lookup tasks at which the hint ends"),
        ("entropy-weight", 0.01, "of the attention's entropy in the loss, behind the hint"),
        ("aux-weight", 0.3, "of naming the two words before, in the loss of the first stages"),
        ("diffuse-bar", 0.75, "accuracy of the diffuse task at which a stage may end"),
    ):
        said = f"{what} (default {default})"
        add(f"--{name}", type=type(default), metavar="N", default=default, help=said)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and export to --out. The exit status: 0; 2 where the state is another run's or
    damaged, or a folder cannot be written; 130 on Ctrl-C, which the step under way outlasts."""
    args, before = arguments(argv), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    try:
        run = Run(args)
        run.resume()
        signal.signal(signal.SIGINT, run.stop)
        run.train()
        if args.out:
            from experiments.lookup_model.export import export

            export(run.model, Path(args.out))
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.work}", file=sys.stderr)
        return 130
    except (Unable, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
