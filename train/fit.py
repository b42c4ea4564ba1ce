"""The training loop: AdamW, warm-up and cosine schedule, seeded, resumable from any save.

Batches are made in a process of their own, ahead of their steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

SAVE_EVERY = 100
_WARM_UP = 50
_CLIP = 1.0

Losses = dict[str, Tensor]
Made = TypeVar("Made")


def device() -> torch.device:
    """Return a GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Steps(Dataset[Made], Generic[Made]):
    """The batches by the number of their step."""

    def __init__(self, batch_of: Callable[[int], Made]):
        self._batch_of = batch_of

    def __getitem__(self, step: int) -> Made:
        torch.set_num_threads(1)
        return self._batch_of(step)


def ahead(batch_of: Callable[[int], Made], steps: int) -> Callable[[int], Made]:
    """Return `batch_of`, to be called for one step after the other; another process calls it."""
    made: list[Iterator[Made]] = []

    def batch(step: int) -> Made:
        if not made:
            loader = DataLoader(
                _Steps(batch_of),
                None,
                sampler=range(step, steps),
                num_workers=1,
                prefetch_factor=4,
                multiprocessing_context="fork",  # else `batch_of` would have to be pickled
            )
            made.append(iter(loader))
        return next(made[0])

    return batch


def fit(
    name: str,
    module: nn.Module,
    losses_of: Callable[[int], Losses],
    steps: int,
    learning_rate: float,
    folder: Path,
) -> None:
    """Train `module` in place, or resume an earlier run of the same name.

    losses_of: returns the losses of a step by name, whose sum is minimised. A step's random draws
    must depend only on its number, so that a resumed run equals an uninterrupted one. folder: of
    the saved state, `name`.pt.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, learning_rate, betas=(0.9, 0.98), weight_decay=0.01, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    file = folder / f"{name}.pt"
    done = _resume(file, module, optimizer, schedule) if file.exists() else 0
    bar = tqdm(range(done, steps), name, initial=done, total=steps, mininterval=5)
    for step in bar:
        torch.manual_seed(step)
        losses = losses_of(step)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        schedule.step()
        bar.set_postfix_str(_format_losses(losses.items()), refresh=False)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            _save(file, module, optimizer, schedule, step + 1)


def _share(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step."""
    warm = min(1.0, (step + 1) / _WARM_UP)
    return warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2)


def _format_losses(losses: Iterable[tuple[str, Tensor]]) -> str:
    return " ".join(f"{name} {float(loss.detach()):.4f}" for name, loss in losses)


def _save(
    file: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    done: int,
) -> None:
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "done": done,
    }
    unfinished = file.with_suffix(".part")
    torch.save(state, unfinished)
    unfinished.replace(file)


def _resume(
    file: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
) -> int:
    state = torch.load(file, weights_only=True, map_location=device())
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["done"])
