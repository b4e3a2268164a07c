"""The faults upstream that kdpkit works around are still there: `docs/upstream/README.md`."""

import platform
import re
import sys

import pytest

from tests.processes import ROOT, run

PROGRAMS = sorted((ROOT / "docs" / "upstream").glob("*.py"))
INDEX = (ROOT / "docs" / "upstream" / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.tensorflow  # once: each program chooses its own backend and devices


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.needs(keras="3.15", jax="0.10", reason="the faults were measured with these versions")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_fault_is_still_there(program):
    if program.stem.startswith("onednn") and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("TensorFlow has oneDNN on x86 alone")
    others = ("KERAS_BACKEND", "XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS", "TF_ENABLE_ONEDNN_OPTS")
    done = run(sys.executable, program, check=False, **dict.fromkeys(others))
    raised = "Traceback" in done.stderr and "Check failed" not in done.stderr
    assert not raised, done.stderr
    assert done.returncode != 0, f"fixed upstream? Remove its workaround.\n{done.stdout}"


def test_every_program_has_its_section_to_which_the_index_links():
    pages = [ROOT / "docs" / "upstream" / f"{name}.md" for name in ("keras", "tensorflow")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"^Program: \[`(\w+\.py)`\]\(\1\)\.$", text, re.MULTILINE)
    assert sorted(named) == [program.name for program in PROGRAMS]
    assert text.count("\n## ") == len(PROGRAMS)
    links = re.findall(r"\]\(((?:keras|tensorflow)\.md#[^)]+)\)", INDEX)
    assert len({*links}) == len(PROGRAMS)  # that they lead to sections: test_docs.py
