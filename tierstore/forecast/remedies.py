"""What would make a plan fit: changes of one setting, each found by planning again, the smallest first.

Settings that change no number come before a tier that must be larger, and that before a tier that must be added, unless
it must be more than twice as large; what rounds numbers comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tierstore.demo.words import size
from tierstore.forecast.answer import Forecast, Remedy
from tierstore.forecast.forecast import forecast, why_not
from tierstore.forecast.question import Question
from tierstore.forecast.steady import MANY_CHUNKS
from tierstore.kernels import LOW_PRECISION
from tierstore.placement import ENOUGH_EXTENTS
from tierstore.policy import CpuTier, NvmeTier, TierPolicy
from tierstore.units import MIN_CHUNK_BYTES, bytes_text

_MOST_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class _Change:
    """One candidate: a policy, and how it came from the one asked for."""

    text: str
    settings: Mapping[str, Any]
    policy: TierPolicy
    rounds: bool = False


def remedies_for(question: Question, policy: TierPolicy, answer: Forecast) -> Iterator[Remedy]:
    """Changes that make a plan fit which does not. The first is planned to the end, and has its step.

    Of very many chunks it is the only one, as each takes seconds to find.
    """
    question, is_first = replace(question, calibrate=False), True
    for change in _changes(question, policy, answer):
        if is_first:
            planned = forecast(question, change.policy)
            if not planned.fits:
                continue
            seconds = None if planned.step is None else planned.step.seconds
            yield Remedy(change.text, change.settings, change.rounds, seconds, planned.bytes_written_per_step)
            if answer.chunks > MANY_CHUNKS:
                return
            is_first = False
        elif why_not(question, change.policy) is None:
            yield Remedy(change.text, change.settings, change.rounds, None, None)


def _changes(question: Question, policy: TierPolicy, answer: Forecast) -> Iterator[_Change]:
    dtypes = {member.form.dtype for member in question.covered}
    if torch.bfloat16 in dtypes and policy.state.master == "float32":
        yield _with_state(policy, "state.master: split, which is the same numbers", master="split")
    yield from _smaller_chunks(policy, answer)
    much: list[_Change] = []
    for name in reversed(list(answer.tiers)):  # the slowest first: there a byte costs least
        change = _more_room(question, policy, answer, name)
        if change is None:
            continue
        if change.settings[f"tiers.{name}.capacity"] > 2 * getattr(policy.tiers, name).capacity:
            much.append(change)
        else:
            yield change
    yield from _more_disk(policy, answer)
    yield from _another_tier(policy, answer)
    yield from much
    if dtypes & set(LOW_PRECISION) and policy.state.moments == "float32":
        yield _with_state(policy, "state.moments: parameter, which rounds moments", True, moments="parameter")
        text = "state.master: none and state.moments: parameter, which round state to the parameters' dtype"
        yield _with_state(policy, text, True, master="none", moments="parameter")


def _with_state(policy: TierPolicy, text: str, rounds: bool = False, **settings: str) -> _Change:
    changed = policy.model_copy(update={"state": policy.state.model_copy(update=settings)})
    return _Change(text, {f"state.{key}": value for key, value in settings.items()}, changed, rounds)


def _smaller_chunks(policy: TierPolicy, answer: Forecast) -> Iterator[_Change]:
    """Chunks of which the smallest tier of a given size holds sixteen."""
    given = [tier.capacity for _, tier in _given_tiers(policy)]
    wanted = min(given, default=0) // 16 // 4096 * 4096
    if MIN_CHUNK_BYTES <= wanted < answer.chunk_bytes:
        text = f"chunk_size: {bytes_text(wanted)}, instead of {bytes_text(answer.chunk_bytes)}"
        yield _Change(text, {"chunk_size": wanted}, policy.model_copy(update={"chunk_size": wanted}))


def _more_room(question: Question, policy: TierPolicy, answer: Forecast, name: str) -> _Change | None:
    """The smallest capacity of a tier of a given size with which all fits; None if none does."""
    given = dict(_given_tiers(policy)).get(name)
    if given is None:
        return None
    extents = {tier: one.extents for tier, one in answer.tiers.items() if not one.is_staging}
    passing = ENOUGH_EXTENTS * (len(answer.tiers) - 1)
    missing = max(1, answer.chunks + passing - sum(extents.values()))
    guess = (answer.tiers[name].extents + missing) * answer.chunk_bytes

    def changed(capacity: int) -> TierPolicy:
        tier = given.model_copy(update={"capacity": capacity})
        return policy.model_copy(update={"tiers": policy.tiers.model_copy(update={name: tier})})

    least = least_that_fits(
        lambda capacity: why_not(question, changed(capacity), is_tuned=False) is None, guess, answer.chunk_bytes
    )
    if least is None or least <= given.capacity:
        return None
    text = f"tiers.{name}.capacity: {bytes_text(least)}, {size(least - given.capacity)} more"
    return _Change(text, {f"tiers.{name}.capacity": least}, changed(least))


def least_that_fits(fits: Callable[[int], bool], guess: int, step: int) -> int | None:
    """The smallest number that fits, in steps from a guess that is near; None if none up to millions of steps does."""
    if fits(guess):
        good, distance = guess, step
        while good - distance > 0 and fits(guess - distance):
            good, distance = guess - distance, 2 * distance
        bad = max(0, guess - distance)
    else:
        bad, distance = guess, step
        while not fits(guess + distance):
            bad, distance = guess + distance, 2 * distance
            if distance > step << _MOST_DOUBLINGS:
                return None
        good = guess + distance
    while good - bad > step:
        middle = bad + (good - bad) // step // 2 * step
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _more_disk(policy: TierPolicy, answer: Forecast) -> Iterator[_Change]:
    """Where an nvme tier that finds its size by itself fits no disk here: one that has the room."""
    nvme, tier = policy.tiers.nvme, answer.tiers.get("nvme")
    if nvme is not None and not isinstance(nvme.capacity, int) and tier is not None and tier.bytes:
        yield _Change(
            f"tiers.nvme.paths: folders on disks with {size(tier.bytes)} free",
            {"tiers.nvme.capacity": tier.bytes},
            _with_tiers(policy, nvme=nvme.model_copy(update={"capacity": tier.bytes})),
        )


def _another_tier(policy: TierPolicy, answer: Forecast) -> Iterator[_Change]:
    if policy.tiers.cpu is None:
        yield _Change("a cpu tier: tiers.cpu: {}", {"tiers.cpu": {}}, _with_tiers(policy, cpu=CpuTier()))
    if policy.tiers.nvme is None:
        yield _Change("an nvme tier: tiers.nvme: {}", {"tiers.nvme": {}}, _with_tiers(policy, nvme=NvmeTier()))
        text = f"an nvme tier on disks with {size(answer.record_bytes)} free"
        capacity = (answer.chunks + ENOUGH_EXTENTS) * answer.chunk_bytes
        added = NvmeTier(capacity=capacity)
        yield _Change(text, {"tiers.nvme.capacity": capacity}, _with_tiers(policy, nvme=added))


def _with_tiers(policy: TierPolicy, **tiers: Any) -> TierPolicy:
    return policy.model_copy(update={"tiers": policy.tiers.model_copy(update=tiers)})


def _given_tiers(policy: TierPolicy) -> Iterator[tuple[str, Any]]:
    """The tiers whose capacities are sizes."""
    for name in policy.tiers.names:
        tier = getattr(policy.tiers, name)
        if isinstance(tier.capacity, int):
            yield name, tier
