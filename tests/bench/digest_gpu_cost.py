"""What the GPU kernel costs, from its compiled code: instructions per word, and the time that follows from the limits.

    python tests/bench/digest_gpu_cost.py

Compiles for sm_90 without a GPU and reads the disassembly (the disassembler comes with the triton package). Nothing
runs on a GPU: the times are predictions, the smaller of what memory and what the issue of instructions allow.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncguard.digest.triton_kernel import PRODUCTS_PER_FOLD, TILE_FIELDS, digest_tiles
from syncguard.digest.triton_path import _INDICES, _LINES, _WARPS, Form

FORMS = {
    "aligned rows": Form(4, 1, aligned=True),
    "rows, 4-byte loads": Form(4, 1),
    "16-bit columns (transposed bf16), or rows at odd places": Form(2, 2),
    "8-bit columns (transposed fp8)": Form(1, 4),
}
# SXM data sheets: bandwidth in bytes a second, SMs, boost clock. Four warp schedulers a SM, one instruction a cycle.
DEVICES = {"H100 (3.35 TB/s)": (3.35e12, 132, 1.755e9), "H200 (4.8 TB/s)": (4.8e12, 132, 1.785e9)}
REACHED = 0.85  # of the data sheet's bandwidth, for a streaming read; an assumption
ROW_WORDS = 2048  # a row of 4,096 bf16 elements


def compiled(form):
    """Return the disassembly and the resource line of the kernel for a form."""
    constants = {
        "WIDTH": form.width, "PARTS": form.parts, "ALIGNED": form.aligned, "LINES": _LINES, "INDICES": _INDICES,
        "FOLD": PRODUCTS_PER_FOLD, "FIELDS": len(TILE_FIELDS),
    }  # fmt: skip
    signature = {"tiles": "*i64", "keys": "*u64", "out": "*u64"} | dict.fromkeys(constants, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(3)}
    source = ASTSource(fn=digest_tiles, signature=signature, constexprs=constants, attrs=aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _WARPS})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = {"capture_output": True, "text": True}
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], check=True, **run).stdout
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], check=True, **run).stdout
    return code, usage


def blocks(code):
    """Return the basic blocks as (label, instructions)."""
    found, label, lines = [], "entry", []
    for line in code.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            found.append((label, lines))
            label, lines = match.group(1), []
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(match.group(1))
    return [*found, (label, lines)]


def loops(code):
    """Return instructions of the inner loop, of the fold around it, and of the end of a group of lines."""
    found = blocks(code)
    jumps_home = [n for n, (label, lines) in enumerate(found) if any(f"BRA `({label})" in line for line in lines)]
    inner = max(jumps_home, key=lambda n: sum("IMAD.WIDE" in line for line in found[n][1]))
    return found[inner][1], found[inner + 1][1], found[inner + 2][1]


def main():
    words = _LINES * _INDICES // (32 * _WARPS)
    print(f"sm_90, {_WARPS} warps, {_LINES} lines x {_INDICES} words, {words} words a thread and step\n")
    print("| form | inner loop, per word | of these multiply-adds | with folds and line ends | registers | spills |")
    print("|---|---|---|---|---|---|")
    total = {}
    for name, form in FORMS.items():
        code, usage = compiled(form)
        inner, fold, end = loops(code)
        per_line = ROW_WORDS * _LINES / (32 * _WARPS)
        each = len(inner) / words + len(fold) / (words * PRODUCTS_PER_FOLD) + len(end) / per_line
        multiplies = sum("IMAD.WIDE" in line for line in inner) / words
        registers = re.search(r"REG:(\d+)", usage).group(1)
        spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
        print(f"| {name} | {len(inner) / words:.1f} | {multiplies:.1f} | {each:.1f} | {registers} | {spills} |")
        total[name] = each
    print(f"\nRows of {ROW_WORDS} words; bytes read per word: 4 from memory (keys come from the caches).\n")
    print("| device | form | memory limit | issue limit | 16 GB | 60 GB |\n|---|---|---|---|---|---|")
    for device, (bandwidth, sms, clock) in DEVICES.items():
        for name, each in total.items():
            issue = sms * 4 * clock * 32 / each * 4
            speed = min(bandwidth * REACHED, issue)
            print(
                f"| {device} | {name} | {bandwidth * REACHED / 1e12:.1f} TB/s | {issue / 1e12:.1f} TB/s "
                f"| {16e12 / speed:.1f} ms | {60e12 / speed:.1f} ms |"
            )


if __name__ == "__main__":
    main()
