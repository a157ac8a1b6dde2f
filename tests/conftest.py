"""Configures every test: one torch thread per process, no network access for models, hypothesis profiles.

Fixtures of a package are beside its tests.
"""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

# Imports make millions of objects that stay: scanning them for garbage took a third of collecting the tests, and would
# slow every test down. `pytest_collection_finish` puts them aside.
gc.disable()

# A shell's background job ignores Ctrl-C, one under nohup a hang-up too, and every process that a test starts would
# inherit that and not be stopped by them. What has a handler here is at its default there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Before anything imports torch: it reads these once. One thread each, because tests run in more processes than cores,
# and because sums must not depend on how many cores a machine has.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[name] = "1"
# Into every new cache torch would compile a probe for each instruction set of the processor, several seconds each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# And precompile the headers that generated code includes, which only pays for many kernels.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Whether there is a GPU is asked of NVML, as CUDA that was initialized does not survive a fork (tests/parallel.py).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# What it compiles is kept for all test processes and between runs, as our kernels are (tests/core/quant/stage.py).
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "d" / "inductor")
)
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads and fork do not mix
# Models in tests are made in code: one that would be downloaded is a bug.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from install import has_gpu  # noqa: E402
from tests import forks  # noqa: E402
from tests.children import python_path  # noqa: E402
from tests.parallel import pytest_addoption, pytest_runtestloop  # noqa: E402
from tests.skips import pytest_terminal_summary  # noqa: E402
from tests.tiers import pytest_collection_modifyitems  # noqa: E402

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_runtestloop", "pytest_terminal_summary"]

# Triton's kernels run in its interpreter where there is no GPU. Set here, because Triton reads it as each kernel is
# defined, and other tests may import the kernels before those that run them do.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# ci: the same examples every time, and no clock, since a shared machine may stall anywhere.
settings.register_profile(
    "ci",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# explore: new examples every time, and twenty times as many; HYPOTHESIS_PROFILE=explore make test
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
# mutants: as ci, but the first example that fails is enough (`make mutants`).
settings.register_profile("mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5000, 10, 10)  # tests make many objects that a file's end frees
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _swept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees what the functions of a file have cached, once its tests are over, and puts aside what stays.

    A file runs in one process, so nothing asks for its caches again; collections then scan what the next file makes.
    """
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _lean() -> Iterator[None]:
    """Processes that tests start import what a user's would. Not earlier: it is the tests' own path too."""
    os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))
    yield
    forks.close()


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    """Fails a test that leaves torch.compile running on a thread: it logs and changes filters of warnings in others."""
    yield
    for thread in threading.enumerate():
        if thread.name == "compile":  # core.graphs: ends once nothing is requested
            thread.join(5.0)
            assert not thread.is_alive(), "code is still compiled: build with compile=False, or wait for it"
