"""The table family x scheme x split, from the reports of one test run."""

from __future__ import annotations

from layout_cases import CELLS
from layout_checkpoints import CHECKPOINTS
from layout_quantize import SCHEMES

OF_A_CELL = ("test_second_witness", "test_single_element_corruption")
"""Files whose tests, both of them, make a cell; a test elsewhere names its cell in a property `row`."""

_LEGEND = """\
Shown on SGLang 0.5.23's own model classes, loaded by their own `load_weights` and post-processing, tiny, on CPU tensors:
every element where the engine's loader put it, and one flipped bit in each resident tensor caught and named.
`exact`: bitwise. `exact+`: bitwise, with derived state checked in the rank. `quantized`: bitwise, with the result of the
published quantization of the exported tensor. `recorded`: bitwise, where the engine's own loader was seen to put it.
`FAILED`: not shown by this run. Blank: not run.
Quantized schemes take the branches that SGLang takes on the device that the scheme names, on CPU tensors. Kernels that
move bytes (Marlin, TRT-LLM, CUTLASS) are replaced by the CPU references that their authors publish; nothing is a live server.
"""


def own_rows(reports: list[tuple[str, str, dict[str, object]]]) -> list[tuple[str, str, str, str]]:
    """Return family, scheme, split and word of the cells that tests name themselves."""
    seen: dict[str, list[str]] = {}
    by_rule: set[str] = set()
    for _, outcome, properties in reports:
        row = str(properties.get("row", ""))
        if row:
            seen.setdefault(row, []).append(outcome)
        if properties.get("recorded") is False:  # every binding that was recorded is one that a rule gives too
            by_rule.add(row)
    rows = []
    for row, outcomes in sorted(seen.items()):
        family, scheme, split, word = row.split("|")
        shown = "exact" if row in by_rule else word
        rows.append((family, scheme, split, shown if set(outcomes) == {"passed"} else "FAILED"))
    return rows


def table(reports: list[tuple[str, str, dict[str, object]]]) -> str:
    """Return the table in Markdown; a cell holds only if every test of it passed."""
    outcomes: dict[str, dict[str, str]] = {}
    derived: set[str] = set()
    refused: list[tuple[str, str]] = []
    constructed: list[str] = []
    for nodeid, outcome, properties in reports:
        name = nodeid.partition("[")[2].removesuffix("]")
        if "test_refused_forms" in nodeid and outcome == "passed" and "refused" in properties:
            refused.append((name, str(properties["refused"])))
            continue
        if "constructed" in properties and outcome == "passed":
            constructed.append(str(properties["constructed"]))
            continue
        if not any(file in nodeid for file in OF_A_CELL):
            continue
        test = nodeid.partition("[")[0]
        outcomes.setdefault(name, {})[test] = outcome
        if properties.get("derived"):
            derived.add(name)
    splits = list(dict.fromkeys(str(cell.split) for cell in CELLS))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in CELLS:
        seen = outcomes.get(str(cell), {})
        if not seen:
            continue
        word = "exact+" if str(cell) in derived else "exact"
        scheme = SCHEMES[cell.scheme].name if cell.scheme in SCHEMES else cell.scheme
        family = CHECKPOINTS[cell.name].family + cell.name.partition("-")[2].join((" (", ")")) * (
            cell.name.endswith(("-tied", "-bias"))
        )
        rows.setdefault((family, scheme), {})[str(cell.split)] = (
            word if set(seen.values()) == {"passed"} and all(any(f in t for t in seen) for f in OF_A_CELL) else "FAILED"
        )
    for family, scheme, split, word in own_rows(reports):
        rows.setdefault((family, scheme), {})[split] = word
    head = ["family", "scheme", *splits]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (family, scheme), cells in rows.items():
        lines.append("| " + " | ".join([family, scheme, *(cells.get(split, "") for split in splits)]) + " |")
    lines += ["", "Exact by construction only (needs a GPU to come about): " + "; ".join(sorted(constructed)) + "."]
    lines += ["", "| unsupported, refused by name | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(refused)]
    return _LEGEND + "\n" + "\n".join(lines) + "\n"
