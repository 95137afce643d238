"""One examination from start to end: look, measure if asked, tell. Changes nothing but the cache of measured rates."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import tierstore
from tierstore.calibrate import find_rates
from tierstore.doctor.finding import Finding, Level, ok, warn
from tierstore.doctor.machine import machine_findings
from tierstore.doctor.swap import capacity_findings, folders_of, swap_findings
from tierstore.doctor.view import print_findings, print_rates
from tierstore.errors import PolicyError
from tierstore.output import STDOUT, check_target, write_json, write_stdout
from tierstore.policy import TierPolicy
from tierstore.rates import PathRates, Rates
from tierstore.tuning import Tuning, per_second, tune

WELL, ILL = 0, 1
"""Exit statuses: nothing fails; something does."""
SLOW_BYTES_PER_SECOND = 200e6
"""Below this a disk that turns, or a network, is behind a path."""
LARGE_BYTES = 1 << 40
"""Of state for which choices are shown: so much that the capacity of tiers is what limits a chunk."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `policy` None: the defaults; `paths` empty: as the policy says; `json` None: none."""

    policy: Path | None = None
    paths: tuple[Path, ...] = ()
    calibrate: bool = False
    json: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    findings: tuple[Finding, ...]
    rates: Rates
    tuning: Tuning | None

    @property
    def is_well(self) -> bool:
        """Whether nothing fails."""
        return all(finding.level is not Level.FAIL for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Answer plain values that JSON can hold."""
        chosen = self.tuning or ()
        return {
            "version": tierstore.__version__,
            "ok": self.is_well,
            "findings": [{**asdict(finding), "level": finding.level.value} for finding in self.findings],
            "calibration": {
                **asdict(self.rates),
                "choices": {choice.key: {"value": choice.value, "why": choice.why} for choice in chosen},
                "bound": self.tuning.bound if self.tuning is not None else None,
            },
        }


def run(options: Options) -> int:
    """Examine and tell; return the exit status. Raises PolicyError or OutputError."""
    check_target(options.json)
    console = Console(
        file=sys.stderr if options.json == STDOUT else sys.stdout, markup=False, emoji=False, highlight=False
    )
    report = examine(options)
    write_stdout(lambda: _print(console, report, options))
    write_json(options.json, report.to_dict())
    return WELL if report.is_well else ILL


def _print(console: Console, report: Report, options: Options) -> None:
    print_findings(console, report.findings)
    if options.calibrate:
        print_rates(console, report.rates, report.tuning)


def examine(options: Options) -> Report:
    """Look at the machine and at swap folders, and measure rates or find those measured before."""
    policy = _policy(options)
    findings = list(machine_findings(policy))
    folders, missing = folders_of(policy, is_asked_for=options.policy is not None)
    findings += missing
    nvme = policy.tiers.nvme
    if nvme is None:
        return Report(tuple(findings), Rates({}, None, None), None)
    looked = {folder: swap_findings(folder, nvme) for folder in folders}
    findings += [finding for found in looked.values() for finding in found]
    sound = [folder for folder, found in looked.items() if all(f.level is not Level.FAIL for f in found)]
    if sound == folders:  # else that is what is wrong
        findings += capacity_findings(policy, folders)
    rates = find_rates(
        sound,
        engine=nvme.io.engine,
        direct=None if nvme.io.direct == "auto" else nvme.io.direct,
        measure=options.calibrate,
        anew=options.calibrate,
    )
    cpu = policy.tiers.cpu.capacity if policy.tiers.cpu is not None else "auto"
    capacity = cpu if isinstance(cpu, int) else None
    tuning = tune(rates, policy, state_bytes=LARGE_BYTES, capacity_bytes=capacity)
    findings += _calibration(rates, is_expected=bool(sound), is_asked=options.calibrate)
    return Report(tuple(findings), rates, tuning)


def _policy(options: Options) -> TierPolicy:
    policy = TierPolicy.load(options.policy)
    if not options.paths:
        return policy
    if policy.tiers.nvme is None:
        raise PolicyError(f"--path {options.paths[0]}: the policy has no nvme tier, so nothing is swapped")
    settings = policy.model_dump(exclude_none=True)
    settings["tiers"]["nvme"]["paths"] = list(options.paths)
    return TierPolicy.load(settings)


def _calibration(rates: Rates, *, is_expected: bool, is_asked: bool) -> list[Finding]:
    findings = [bandwidth_finding(name, path) for name, path in rates.paths.items()]
    if rates.machine is not None:
        copied, elements = rates.machine.copied_bytes_per_second, rates.machine.elements_per_second
        text = f"memory: copied at {per_second(copied)}; AdamW updates {elements / 1e6:,.0f} million elements a second"
        findings.append(ok("bandwidth", text))
    if rates.paths and rates.measured_at is not None:
        findings.append(ok("calibration", f"measured {rates.measured_at}; --calibrate measures anew"))
    elif is_expected and not is_asked:
        text = "none yet: above 1 GiB of state in files, the first step measures for at most a second"
        findings.append(ok("calibration", f"{text}; --calibrate does now"))
    for note in rates.notes:
        findings.append(warn("calibration", note, "the defaults are used: nothing is wrong with that"))
    return findings


def bandwidth_finding(name: str, path: PathRates) -> Finding:
    """Judge how fast a path was when it was measured."""
    text = (
        f"{name}: reads {per_second(path.read_bytes_per_second)}, writes {per_second(path.write_bytes_per_second)}, "
        f"both at once {per_second(path.mixed_bytes_per_second)}"
    )
    if path.mixed_bytes_per_second < SLOW_BYTES_PER_SECOND:
        return warn("bandwidth", text, "each step waits for it: add a folder on a faster disk, or a larger cpu tier")
    return ok("bandwidth", text)
