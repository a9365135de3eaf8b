"""The engine is chosen at the start, proven before use, and a missing fast path is loud."""

import os
import subprocess
import sys

import numpy as np
import pytest

from syncguard.digest import KNOWN_ANSWER_COUNT, PartialDigest, engine_for, selftest, warm_up
from syncguard.digest import select as selection
from syncguard.digest.cpu import NumbaEngine
from syncguard.digest.reference import NumpyEngine
from syncguard.errors import IncompleteError


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def fresh():
    engine_for.cache_clear()
    yield
    engine_for.cache_clear()


class Wrong(NumbaEngine):
    def partials(self, jobs, **options):
        return [PartialDigest(p.count, p.coverage, p.data ^ 1) for p in super().partials(jobs, **options)]


class Broken(NumbaEngine):
    def partials(self, jobs, **options):
        raise RuntimeError("LLVM ERROR")


def test_importing_the_package_imports_neither_torch_nor_numba():
    code = (
        "import sys, syncguard.digest; print([m for m in ('torch', 'numba', 'llvmlite', 'triton') if m in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


def test_numpy_arrays_are_digested_without_torch():
    code = (
        "import sys, numpy as np; from syncguard.digest import *; selftest(); storage_digest(np.zeros(3));"
        "print('torch' in sys.modules)"
    )
    assert python(code).stdout.strip() == "False"


def test_the_fast_path_is_chosen_here():
    assert warm_up() == "numba"
    assert engine_for("cpu") is engine_for("cpu")


@pytest.mark.parametrize("engine", [Wrong, Broken])
def test_a_fast_path_that_is_wrong_or_broken_is_passed_over_loudly(engine, fresh, monkeypatch, caplog):
    monkeypatch.setattr(selection, "_numba_engine", engine)
    assert engine_for("cpu").name != "numba"
    assert "SLOW DIGESTS" in caplog.text


def test_without_numba_the_result_is_the_same_and_the_log_says_so():
    code = (
        "import sys, logging; logging.basicConfig(); sys.modules['numba'] = None\n"
        "from syncguard.digest import *; print(warm_up(), selftest())"
    )
    done = python(code)
    assert done.stdout.split() == ["numpy", str(KNOWN_ANSWER_COUNT)]
    assert "SLOW DIGESTS" in done.stderr


def test_without_numba_a_process_that_has_torch_uses_torch():
    code = (
        "import sys, torch; sys.modules['numba'] = None\nfrom syncguard.digest import *; print(warm_up(), selftest())"
    )
    assert python(code).stdout.split() == ["torch", str(KNOWN_ANSWER_COUNT)]


def test_the_known_answers_hold_for_every_engine_and_are_counted(engine):
    assert selftest(engine) == KNOWN_ANSWER_COUNT == 12


def test_a_wrong_known_answer_raises():
    with pytest.raises(IncompleteError, match="self-test"):
        selftest(Wrong())


def test_fewer_known_answers_than_expected_raise(monkeypatch):
    from syncguard.digest import selftest as module

    monkeypatch.setattr(sys.modules["syncguard.digest.selftest"], "KNOWN_ANSWERS", ())
    with pytest.raises(IncompleteError, match="did not run to its end"):
        module(NumpyEngine())


def test_a_forked_child_of_a_process_that_used_threads_gets_the_same_answer():
    code = (
        "import os, numpy as np\n"
        "from syncguard.digest import *\n"
        "from syncguard.digest.cpu import NumbaEngine\n"
        "from syncguard.spec import *\n"
        "a = np.arange(8_000_000, dtype=np.uint16).reshape(2000, 4000)\n"
        "job = DigestJob(a, dtype_named('bfloat16'), a.shape, Box.whole(a.shape))\n"
        "before = NumbaEngine(threads=2).partials([job])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if NumbaEngine(threads=2).partials([job]) == before else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert python(code).stdout.strip() == "0"


def test_expanding_a_new_seed_does_not_change_old_answers():
    from syncguard.digest import DigestJob
    from syncguard.spec import Box, dtype_named

    view = np.arange(12, dtype=np.uint8)
    job = DigestJob(view, dtype_named("uint8"), (12,), Box.whole((12,)))
    engine = NumbaEngine()
    first = engine.partials([job])
    for n in range(6):
        engine.partials([job], key_seed=bytes([n]) * 32)
    assert engine.partials([job]) == first


def test_kernels_compile_without_a_cache_where_no_folder_can_be_written(monkeypatch, caplog):
    import numba

    from syncguard.digest.cpu_keys import compiled

    plain = numba.njit

    def njit(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda a: a + 1)(2) == 3
    assert "compiled anew in each process" in caplog.text


def test_a_plan_reads_what_is_in_memory_now():
    import torch

    from syncguard.digest import DigestJob
    from syncguard.spec import Box, dtype_named

    tensor = torch.zeros(6, 8, dtype=torch.bfloat16)
    job = DigestJob(tensor, dtype_named("bfloat16"), (6, 8), Box.whole((6, 8)), "w")
    plan = NumbaEngine().plan([job])
    before = plan.partials()
    tensor[3, 4] = 1
    assert plan.partials() == NumbaEngine().partials([job]) != before


def test_a_plan_refuses_memory_that_was_moved_or_freed():
    import torch

    from syncguard.digest import DigestJob
    from syncguard.errors import DigestInputError
    from syncguard.spec import Box, dtype_named

    def planned():
        tensor = torch.ones(6, 8, dtype=torch.bfloat16)
        job = DigestJob(tensor, dtype_named("bfloat16"), (6, 8), Box.whole((6, 8)), "w")
        return tensor, NumbaEngine().plan([job])

    moved, plan = planned()
    moved.data = torch.zeros(6, 8, dtype=torch.bfloat16)
    with pytest.raises(DigestInputError, match="memory moved"):
        plan.partials()
    freed, plan = planned()
    freed.untyped_storage().resize_(0)
    with pytest.raises(DigestInputError, match="memory moved"):
        plan.sums()
