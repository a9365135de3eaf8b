"""`syncguard layout`: what each rank of a worker holds, and which rank holds which part of a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncguard.cli.output import console, print_json, progress_bar
from syncguard.errors import ExitCode, UsageError
from syncguard.spec import DTYPES, Box

BAR_CELLS = 40


def layout(
    agent: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the worker's agent.")] = "",
    url: Annotated[str, typer.Option(metavar="URL", help="SGLang server with the probe, instead of an agent.")] = "",
    explain: Annotated[str, typer.Option(metavar="TENSOR", help="Draw which rank holds which part of it.")] = "",
    tls_ca: Annotated[Path | None, typer.Option(help="CA certificate of the agent; without it, loopback only.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate; goes with --tls-ca and --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the client certificate.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds a bearer token.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds until the worker counts as unreachable.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Show a worker's layout: a table a rank, or with --explain which rank and rows hold which box of a tensor."""
    if bool(agent) == bool(url):
        raise UsageError("worker", expected="--agent or --url", found="both" if agent else "neither")
    with progress_bar(f"asking {agent or url}", as_json=as_json):
        if agent:
            from syncguard.gate.client import AgentClient
            from syncguard.rpc.credentials import client_credentials

            credentials = client_credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file)
            with AgentClient(agent, credentials=credentials, timeout_s=timeout_s) as client:
                ranks = client.layouts()
        else:
            ranks = _of_server(url, timeout_s)
    if explain:
        found = explanation(ranks, explain)
        if as_json:
            print_json(found.as_dict())
        else:
            print_explanation(console(), found)
    elif as_json:
        print_json({"ranks": [summary(rank).as_dict() for rank in ranks]})
    else:
        for rank in ranks:
            print_summary(console(), summary(rank))
    if any(rank.unbound for rank in ranks):
        raise typer.Exit(int(ExitCode.UNSUPPORTED))


def _of_server(url: str, timeout_s: float) -> tuple[Any, ...]:
    from syncguard.engines.sglang import SglangEngine
    from syncguard.manifest.wire import layout_to_proto

    engine = SglangEngine(url, timeout_s=timeout_s)
    try:
        return tuple(layout_to_proto(found) for found in engine.layouts())
    finally:
        engine.close()


@dataclass(slots=True)
class ClassRow:
    """Residents of one layer class on one rank."""

    tensors: int = 0
    size_bytes: int = 0
    states: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's layout in a few lines.

    Attributes:
        rank: As `RankIdentity` writes it.
        architecture: Name of the live model class.
        fingerprint: Of the layout.
        classes: Row of each layer class.
        unbound: What has no rule, with the reason.
        uncovered: What the walk cannot see.
        dropped: Exported tensors that loading drops, with the reason.
    """

    rank: str
    architecture: str
    fingerprint: str
    classes: dict[str, ClassRow]
    unbound: tuple[str, ...]
    uncovered: tuple[str, ...]
    dropped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for `--json`."""
        return {
            "rank": self.rank,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "classes": {
                name: {"tensors": row.tensors, "bytes": row.size_bytes, **row.states}
                for name, row in self.classes.items()
            },
            "unbound": list(self.unbound),
            "uncovered": list(self.uncovered),
            "dropped": list(self.dropped),
        }


def _rank_name(rank: Any) -> str:
    parts = [f"tp{rank.tp_rank}/{rank.tp_size}"]
    parts += [f"pp{rank.pp_rank}/{rank.pp_size}"] if rank.pp_size > 1 else []
    parts += [f"dp{rank.dp_rank}/{rank.dp_size}"] if rank.dp_size > 1 else []
    return " ".join(parts + ([rank.role] if rank.role not in {"", "target"} else []))


def summary(rank: Any) -> RankSummary:
    """Return the summary of one rank's layout message; a tensor that nothing claims counts as `unclaimed`.

    `recorded` is bound too, by what the engine's own loader did instead of a rule.
    """
    bound = {binding.resident for binding in rank.bindings}
    recorded = {binding.resident for binding in rank.bindings if binding.source == "recorded"}
    named = {
        state: {line.partition(": ")[0] for line in getattr(rank, state)} for state in ("unbound", "derived", "exempt")
    }
    classes: dict[str, ClassRow] = {}
    for resident in rank.residents:
        row = classes.setdefault(resident.layer_class, ClassRow())
        state = next((state for state, names in named.items() if resident.name in names), "unclaimed")
        if resident.alias_of:
            state = "alias"
        elif resident.name in bound:
            state = "recorded" if resident.name in recorded else "bound"
        row.tensors += 1
        row.states[state] = row.states.get(state, 0) + 1
        if state != "alias":
            dtype = DTYPES.get(resident.dtype)
            row.size_bytes += prod(resident.shape) * (dtype.itemsize_bytes if dtype else 0)
    return RankSummary(
        _rank_name(rank.rank),
        rank.architecture,
        rank.fingerprint,
        dict(sorted(classes.items(), key=lambda item: -item[1].size_bytes)),
        tuple(rank.unbound),
        tuple(rank.uncovered),
        tuple(rank.dropped),
    )


def print_summary(out: Console, found: RankSummary) -> None:
    """Print one rank's table."""
    out.print(Text.assemble((found.rank, "bold"), f"  {found.architecture}  ", (found.fingerprint[:12], "dim")))
    table = Table(box=None, pad_edge=False)
    for name in ("layer class", "tensors", "MB", "state"):
        table.add_column(name, justify="left" if name in {"layer class", "state"} else "right")
    for name, row in found.classes.items():
        states = ", ".join(f"{count} {state}" for state, count in sorted(row.states.items()))
        style = "magenta" if {"unbound", "unclaimed"} & row.states.keys() else ""
        table.add_row(name, str(row.tensors), f"{row.size_bytes / 1e6:.2f}", Text(states, style=style))
    out.print(table)
    for title, lines in (("no rule", found.unbound), ("not covered", found.uncovered)):
        for line in lines:
            out.print(Text.assemble((f"{title}: ", "magenta"), line))
    for reason, count in Counter(line.partition(": ")[2] for line in found.dropped).items():
        out.print(Text.assemble(("dropped on loading: ", "dim"), f"{count} exported tensors, {reason}"))


@dataclass(frozen=True, slots=True)
class Holder:
    """A box of the tensor and where one rank holds it."""

    rank: str
    box: Box
    resident: str
    views: tuple[str, ...]
    form: str
    source: str
    alias: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds which part of one logical tensor."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    holders: tuple[Holder, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation for `--json`."""
        return {
            "tensor": self.fqn,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "holders": [
                {
                    "rank": holder.rank,
                    "box": str(holder.box),
                    "resident": holder.resident,
                    "views": list(holder.views),
                    "form": holder.form,
                    "source": holder.source,
                    "alias": holder.alias,
                }
                for holder in self.holders
            ],
        }


def explanation(ranks: Sequence[Any], fqn: str) -> Explanation:
    """Return who holds a tensor.

    Raises:
        UsageError: No rank holds any part of a tensor of that name.
    """
    holders = []
    tensor = None
    names = set()
    for rank in ranks:
        for binding in rank.bindings:
            names.add(binding.tensor.fqn)
            if binding.tensor.fqn != fqn:
                continue
            tensor = binding.tensor
            box = Box(tuple(binding.box.offsets), tuple(binding.box.sizes))
            holders.append(
                Holder(
                    _rank_name(rank.rank),
                    box,
                    binding.resident,
                    tuple(binding.ops),
                    binding.form,
                    binding.source,
                    binding.alias,
                )
            )
    if tensor is None:
        near = get_close_matches(fqn, names, n=3, cutoff=0.3)
        raise UsageError("tensor", expected=" or ".join(near) or "a name that the worker holds", found=repr(fqn))
    holders.sort(key=lambda holder: (holder.box, holder.rank))
    return Explanation(fqn, tensor.dtype, tuple(tensor.shape), tuple(holders))


def bar(box: Box, shape: Sequence[int], cells: int = BAR_CELLS) -> str:
    """Draw what part of the first split dimension a box is, `·` where it is not; full when nothing is split."""
    split = [dim for dim, size in enumerate(shape) if box.sizes[dim] != size]
    if not split:
        return "█" * cells
    dim = split[0]
    low = box.offsets[dim] * cells // shape[dim]
    high = max(low + 1, -(-(box.offsets[dim] + box.sizes[dim]) * cells // shape[dim]))
    return "·" * low + "█" * (high - low) + "·" * (cells - high)


def print_explanation(out: Console, found: Explanation) -> None:
    """Print a line a holder: rank, a drawing of the box, where it lies in the resident tensor."""
    out.print(Text.assemble((found.fqn, "bold"), f"  {found.dtype} {list(found.shape)}"))
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "part", "box", "resident tensor", "views"):
        table.add_column(name, overflow="fold")
    copies: dict[Box, int] = {}
    for holder in found.holders:
        copies[holder.box] = copies.get(holder.box, 0) + 1
        marks = [word for word, on in (("alias", holder.alias), ("replica", copies[holder.box] > 1)) if on]
        marks += [word for word in (holder.form, holder.source) if word not in {"bitwise", "rule"}]
        table.add_row(
            holder.rank,
            bar(holder.box, found.shape),
            str(holder.box),
            holder.resident + (f" ({', '.join(marks)})" if marks else ""),
            " ".join(holder.views) or "as it lies",
        )
    out.print(table)
