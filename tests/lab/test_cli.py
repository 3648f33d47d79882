"""The command line: what each command prints and writes, exit codes, errors in one line."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console

import gemmule as gm
from children import ended
from gemmule import backends
from gemmule.backends.cuda import driver
from gemmule_lab import cli, doctor
from gemmule_lab.cli import run
from gemmule_lab.commands import _options as options
from gemmule_lab.report.render import terminal_table
from gemmule_lab.report.tables import TableData
from gemmule_lab.verify import check
from proofs.__main__ import proofs


@pytest.fixture
def matrices(folder: Path) -> Path:
    """A working folder with A (5 x 7), x (7), left (5) and B (7 x 3) of small integers.

    Z is complex; N and P (7 x 7) have one integer beyond int8.
    """
    rng = np.random.default_rng(0)
    for name, shape in {"A": (5, 7), "x": (7,), "left": (5,), "B": (7, 3)}.items():
        np.save(folder / f"{name}.npy", rng.integers(-3, 4, shape).astype(np.float32))
    np.save(folder / "Z.npy", np.full((5, 7), 1 + 2j))
    (folder / "words").write_text("no results\n")
    for name, value in {"N": -129, "P": 128}.items():
        np.save(folder / f"{name}.npy", np.diag([value, 0, 0, 0, 0, 0, 0]))
    return folder


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("A", "x", lambda A, x: A @ x),
        ("left", "A", lambda left, A: left @ A),
        ("A", "B", lambda A, B: A @ B),
    ],
)
def test_multiply_writes_the_product(
    matrices: Path, first: str, second: str, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["multiply", f"{first}.npy", f"{second}.npy", "-o", "y.npy", "--check"]) == 0
    operands = (np.load(f"{name}.npy") for name in (first, second))
    np.testing.assert_array_equal(np.load("y.npy"), expected(*operands))
    out, err = said(capsys)
    assert "elements right" in out
    assert "wrote y.npy: float32" in out
    assert err == ""


def test_vecmat_takes_the_vector_on_either_side(matrices: Path) -> None:
    assert run(["multiply", "A.npy", "left.npy", "--op", "vecmat", "-o", "y.npy"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.load("left.npy") @ np.load("A.npy"))


@pytest.mark.parametrize("bits", ["4", "8"])
def test_multiply_quantised(matrices: Path, bits: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["multiply", "A.npy", "x.npy", "--bits", bits, "--group-size", "-1", "-o", "y.npy"]
    assert run([*command, "--check"]) == 0
    quantised = gm.quantize(np.load("A.npy"), bits=int(bits), group_size=-1)
    truth = quantised.dequantize("float64") @ np.load("x.npy")
    np.testing.assert_allclose(np.load("y.npy"), truth, rtol=1e-5, atol=1e-5)
    assert "of its bound" in said(capsys)[0]


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_check_tells_the_quantisation_error_beside_the_rounding(
    folder: Path, op: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "all right" of a product far from the file's, and not what it had compared."""
    rng = np.random.default_rng(1)
    A = rng.standard_normal((60, 40)).astype(np.float32)
    other = {"matvec": A[0], "vecmat": A[:, 0], "matmul": A.T[:, :3]}[op].copy()
    np.save("A.npy", A)
    np.save("x.npy", other)
    pair = ("x.npy", "A.npy") if op == "vecmat" else ("A.npy", "x.npy")
    command = ["multiply", *pair, "--op", op, "--bits", "4", "--group-size", "-1", "--check"]
    assert run([*command, "-o", "y.npy"]) == 0
    out, _ = said(capsys)
    exact = other @ A.astype(float) if op == "vecmat" else A.astype(float) @ other
    wanted = 100 * np.linalg.norm(np.load("y.npy") - exact) / np.linalg.norm(exact)
    assert wanted > 3
    assert "elements right" in out
    assert f"the 4-bit matrix; it is {wanted:.3g} % off that of the file's own" in out


@pytest.mark.parametrize("size", ["0", "-2"])
def test_group_sizes_that_are_none(
    matrices: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["multiply", "A.npy", "x.npy", "--bits", "4", "--group-size", size]) == 2
    assert f"group_size is {size}" in said(capsys)[1]


def test_a_result_never_replaces_what_is_read(
    matrices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("x.npy").read_bytes()
    Path("link.npy").symlink_to("x.npy")
    for name in ("x.npy", "./x.npy", "link.npy"):
        assert run(["multiply", "A.npy", "x.npy", "-o", name, "--force"]) == 2
        assert "is read by this command" in said(capsys)[1]
    assert Path("x.npy").read_bytes() == before


@pytest.mark.parametrize("content", ["", "garbage\n", "{}\n", "\0" * 100])
def test_a_report_of_nothing_is_an_error(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    assert run(["report", str(path)]) == 2
    assert "results.jsonl" in said(capsys)[1]


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_blocks_give_the_product_of_the_whole(op: str) -> None:
    from gemmule_lab.files.multiply import Job, blocks, multiply

    rng = np.random.default_rng(1)
    A = rng.integers(-3, 4, (37, 29)).astype(np.float64)
    x = rng.integers(-3, 4, {"matvec": (29,), "vecmat": (37,), "matmul": (29, 5)}[op])
    left, right = (x, A) if op == "vecmat" else (A, x)
    job = Job(op, left.astype(np.float64), right.astype(np.float64), dtype="float32")
    out = np.zeros(job.shape, job.result)
    assert len(blocks(job, 1000)) > 3
    parts = list(multiply(job, out, blocks(job, 1000)))
    assert len(parts) == len(blocks(job, 1000))
    np.testing.assert_array_equal(out, left @ right)


def test_a_mapped_matrix_is_not_converted_in_one_piece(tmp_path: Path) -> None:
    import tracemalloc

    from gemmule_lab.files.matrices import read_matrix
    from gemmule_lab.files.multiply import Job, blocks, multiply

    np.save(tmp_path / "A.npy", np.ones((4096, 1024), np.float32))
    job = Job("matvec", read_matrix(str(tmp_path / "A.npy")), np.ones(1024), dtype="float64")
    out = np.zeros(4096)
    list(multiply(job, out, blocks(job, 1 << 20)))  # compiles
    tracemalloc.start()
    try:
        list(multiply(job, out, blocks(job, 1 << 20)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (out == 1024).all()
    assert peak < 8 << 20, "the float64 copy of all of A takes 32 MiB"


def test_a_wrong_product_is_exit_code_1(
    matrices: Path, fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def off(sound: Any, *operands: Any, **options: Any) -> Any:
        result = sound(*operands, **options)
        result[-1] *= 1.001
        return result

    fault(gm, "matvec", off)
    assert run(["multiply", "A.npy", "x.npy", "-o", "y.npy", "--check"]) == 1
    assert not Path("y.npy").exists(), "a result known to be wrong was written"
    assert "the result is wrong" in said(capsys)[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["multiply", "A.npy", "nope.npy"], "nope.npy is missing"),
        (["multiply", "A.npy", "left.npy"], "must be equal"),
        (["multiply", "A.npy", "x.npy", "-o", "none/y.npy"], "folder none does not exist"),
        (["multiply", "A.npy", "x.npy", "-o", "x.npy"], "--force"),
        (["multiply", "A.npy", "x.npy", "-o", "y.txt"], "suffix '.txt'"),
        (["multiply", "A.npy", "x.npy", "--dtype", "int8"], "round"),
        (["multiply", "Z.npy", "x.npy", "--dtype", "float32"], "drop the imaginary part"),
        (["multiply", "N.npy", "N.npy", "--dtype", "int8"], "values from -129 to 0"),
        (["multiply", "P.npy", "P.npy", "--dtype", "int8"], "values from 0 to 128"),
        (["multiply", "A.npy", "x.npy", "--rung", "nope"], "no cpu rung is called 'nope'"),
        (["multiply", "A.npy", "x.npy", "--rung", "four_row"], "did you mean 'four_rows'?"),
        (["multiply", "A.npy", "x.npy", "--rung", "thread_per_row"], "it is one of cuda"),
        (["tune", "--rung", "four_rows", "--products", "5"], "--products, --rung go with --device"),
        (["tune", "--device-model", "--sizes", "8x8"], "--sizes are of products that are named"),
        (["ladder", "--device", "cpu"], "gemmule ladder --help lists them"),
        (["multiply", "A.npy"], "Missing argument"),
        (["lader"], "No such command 'lader'. Did you mean ladder?"),
        (["xyz"], "There are: advise, bench"),
        (["bench", "--sise", "8"], "Did you mean"),
        (["hunt", "--peer", "torch", "--format", "int4"], "torch takes no int4"),
        (["bench", "--out", "A.npy/there"], "A.npy"),
        (["hunt", "--out", "A.npy"], "A.npy"),
        (["study", "003", "--evidence", "A.npy/x"], "A.npy"),
        (["ladder", "nope"], "'nope' is not one of"),
        (["verify", "--rung", "nope", "--cases", "1"], "no cpu rung is called 'nope'"),
        (["verify", "--stale", "--check"], "PYTHONPATH=tools python -m proofs"),
        (["verify", "--device", "cuda", "--evidence", "e"], "PYTHONPATH=tools python -m proofs"),
        (["sanitize", "--rung", "naive"], "PYTHONPATH=tools python -m sanitizer"),
        (["extremes"], "PYTHONPATH=tools python -m extremes"),
        (["counters", "--evidence", "e"], "PYTHONPATH=tools python -m counters"),
        (["crosscheck"], "PYTHONPATH=tools python -m counters.crosscheck"),
        (["verify", "--device", "tpu"], "--device is 'tpu'"),
        (["verify", "--anew"], "PYTHONPATH=tools python -m proofs"),
        (["hunt", "--seconds", "nan"], "nan is no number in the range"),
        (["hunt", "--peer", "nope"], "--peer is 'nope'"),
        (["bench", "--peer", "numpy"], "--peer is for a GPU"),
        (["tune", "--sizes", "8x8", "--bits", "4", "--group-size", "0"], "group_size is 0"),
        (["multiply", "A.npy", "x.npy", "--group-size", "8"], "pass --bits"),
        (["multiply", "A.npy", "x.npy", "--symmetric"], "pass --bits"),
        (["report", "missing.jsonl"], "missing.jsonl"),
        (["report", "A.npy", "-o", "page.html"], "A.npy"),
        (["report", "A.npy"], "bytes that are no text; results are files of JSON lines"),
        (["study", "3", "--only", "nope"], "no document named has the experiment nope"),
        (["study", "7"], "'007' is not one of"),
        (["quantize", ".", "out"], "has no config.json; give a model's folder"),
        (["quantize", ".", "out", "--group-size", "-3"], "group_size is -3"),
        (["report", "words"], "words, line 1: no line of results as `gemmule bench` writes"),
        (["bench", "--device", "gpu"], "--device is 'gpu'"),
        (["bench", "--suite", "nope"], "--suite is 'nope'; on cpu it must be one of quick"),
        (["bench", "--size", "abc"], "'abc' is not a valid whole number"),
        (["hunt", "--out", "A.npy/x"], "--out A.npy/x cannot be written to"),
        (["ladder", "nope"], "Invalid value for '[OP]'"),
        (["verify", "--rung", "threads", "--op", "matmul"], "no cpu rung of matmul is called"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    matrices: Path, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    _, err = said(capsys)
    assert message in err
    assert err.startswith("gemmule: ")
    assert err.count("\n") == 1


OF_A_GPU = (
    *("bench", "hunt", "warm", "demo", "verify --cases 1", "verify --share s.zip"),
    *("hunt --op grouped", "hunt --op epilogue", "hunt --format int4", "hunt --fit"),
    *("tune --device-model", "tune --sizes 8x8", "multiply A.npy x.npy"),
)


@pytest.mark.parametrize("command", OF_A_GPU)
def test_a_gpu_that_is_not_there_is_what_is_missing(
    matrices: Path, command: str, modules: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a peer, sizes or a package that one would need only beside it."""
    modules(**{"cuda": None, "cuda.bindings": None})
    driver.bindings.cache_clear()
    assert run([*command.split(), "--device", "cuda"]) == 2
    _, err = said(capsys)
    driver.bindings.cache_clear()
    assert err.startswith("gemmule: CUDA operands need cuda-bindings")
    assert err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert said(capsys)[1].startswith("Usage: gemmule [OPTIONS] COMMAND")


def test_what_pytorch_is_needed_for_says_how_to_install_it(
    matrices: Path, fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(sound: Any, *given: Any, **more: Any) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    fault(cli.cli, "main", missing)
    assert run(["quantize", ".", "out"]) == 2
    assert "this needs torch, which is not installed: pip install 'torch" in said(capsys)[1]


def test_debug_raises_what_is_told_in_one_line_otherwise(matrices: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(["--debug", "multiply", "A.npy", "nope.npy"])


def test_ctrl_c_in_a_destructor_stops_the_command(
    fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what is raised in destructors and callbacks; compiling is full of them."""

    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def command(sound: Any, **_: Any) -> int:
        Interrupted()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass
        return 0

    fault(cli.cli, "main", command)
    before = sys.unraisablehook
    # A shell starts what it runs in the background with the signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(["multiply"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "stopped." in said(capsys)[1]
    assert sys.unraisablehook is before


def test_commands_stand_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out, _ = said(capsys)
    places = [out.index(title) for title in cli.SECTIONS.values()]
    assert places == sorted(places)
    assert places[0] < out.index("  multiply ") < places[1] < out.index("  bench ") < places[2]
    assert places[2] < out.index("  doctor ")
    for name in cli.cli.list_commands(click.Context(cli.cli)):
        assert out.count(f"\n  {name} ") == 1


def test_every_command_answers_in_json() -> None:
    for name in cli.cli.list_commands(click.Context(cli.cli)):
        command = cli.cli.get_command(click.Context(cli.cli), name)
        assert command is not None
        assert "--json" in {word for one in command.params for word in one.opts}


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        (["multiply", "A.npy", "x.npy"], "shape", [5]),
        (["multiply", "A.npy", "x.npy", "-o", "y.npy", "--check"], "right", True),
        (["verify", "--cases", "4", "--workers", "1", "--rung", "scalar_loop"], "done", 4),
        (["bench", "--op", "matvec", "--size", "8", "--seconds", "0.05"], "absent", None),
        (["hunt", "--products", "1", "--op", "matvec", "--format", "float32"], "products", None),
        (["warm", "--bits", "8"], "products", None),
    ],
)
def test_json_alone_is_on_standard_output(
    matrices: Path,
    quick_bench: None,
    command: list[str],
    key: str,
    value: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*command, "--json"]) == 0
    out, err = said(capsys)
    found = json.loads(out)
    assert found[key] == value or (value is None and found[key])
    assert len(err) > 20


def test_json_of_a_failure(
    matrices: Path, fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fault(gm, "matvec", lambda sound, A, x, **o: sound(A, x, **o) + 1)
    assert run(["multiply", "A.npy", "x.npy", "--check", "--json"]) == 1
    assert json.loads(said(capsys)[0])["right"] is False


def test_json_has_no_numbers_that_are_none() -> None:
    odd = {(1, 2): [math.nan, math.inf, np.float64(0.5)], "path": Path("a"), "set": {3}}
    assert options.plain(odd) == {"1 x 2": [None, None, 0.5], "path": "a", "set": [3]}


@pytest.mark.parametrize(
    ("words", "wanted", "unwanted"),
    [
        ("gemmule l", {"ladder"}, {"bench"}),
        ("gemmule verify --rung four", {"four_rows"}, {"wgmma_tile"}),
        ("gemmule verify --device cuda --rung wgmma_t", {"wgmma_tile"}, {"four_rows"}),
        ("gemmule verify --op vecmat --rung s", {"split_columns"}, {"scalar_loop"}),
        ("gemmule bench --suite q", {"quick"}, {"cpu", "quantised"}),
        ("gemmule bench --device cuda --suite q", {"quick", "quantised"}, {"cpu"}),
        ("gemmule hunt --peer t", {"torch"}, {"numpy"}),
        ("gemmule study 003 --only s", {"sizes"}, set()),
        ("gemmule multiply --bits 4 --rung vec", {"vector_decode"}, {"vector_tile"}),
        ("gemmule demo --device c", {"cpu", "cuda"}, set()),
    ],
)
def test_completion(
    words: str,
    wanted: set[str],
    unwanted: set[str],
    setting: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words.split()
    setting(_GEMMULE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(given) - 1))
    with pytest.raises(SystemExit):
        run([])
    found = {line.partition(",")[2] for line in said(capsys)[0].splitlines()}
    assert wanted <= found
    assert not unwanted & found


@pytest.mark.parametrize("width", [40, 60, *range(76, 80), 90, 120, 200])
def test_tables_fit_the_terminal_and_lose_no_cell(width: int) -> None:
    header = ("product", "rung", "us", "x over torch", "remarks")
    rows = (
        ("4096 x 4096, matvec, float16", "prefetched_rows", "1,234", "1.20 (1.10 to 1.30)", ""),
        ("384 x 384, vecmat, int4", "vector_decode", "9.1", "0.80 (0.70 to 0.90)", "disturbed"),
    )
    table = TableData("title", header, rows, (False, False, True, True, False), frozenset({0}))
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for row in rows:
        for cell in row[1:]:
            assert cell in flat or width == 40, cell
    assert ("┃" in text) is (width >= 78), "columns from the first width that holds them"


def test_ctrl_c_is_clean_before_and_after_a_command() -> None:
    """In imports and at the interpreter's end nothing is there to catch the exception."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from gemmule_lab import start; sys.argv[1:] = ['--version']; "
        "import atexit; atexit.register(lambda: print(signal.getsignal(signal.SIGINT))); "
        "start.quiet(); print(signal.getsignal(signal.SIGINT)); start.main()"
    )
    done = ended("-c", code)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == last == str(signal.SIG_DFL)


def test_every_module_of_the_folder_is_a_command() -> None:
    names = cli.cli.list_commands(click.Context(cli.cli))
    assert {"bench", "demo", "doctor", "ladder", "multiply", "report", "verify"} <= set(names)
    for name in names:
        command = cli.cli.get_command(click.Context(cli.cli), name)
        assert command is not None
        assert command.name == name
        assert command.help


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul", "quantized"])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_ladder_lists_every_rung(op: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ladder", op, "--backend", backend]) == 0
    out, _ = said(capsys)
    for rung in gm.ladder(op, backend=backend):
        assert f" {rung.name}  " in out
    assert run(["ladder", op, "--backend", backend, "--markdown"]) == 0


def test_doctor_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out, _ = said(capsys)
    for part in ("Python", "NumPy", "llvmlite", "CPU products", "cache", "CUDA driver"):
        assert part in out


def test_doctor_fails_where_products_are_wrong(
    fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fault(gm, "matvec", lambda sound, A, x: np.zeros(len(A), A.dtype))
    assert run(["doctor"]) == 1
    assert "does not work: CPU products" in said(capsys)[1]


def test_doctor_tells_the_rule_of_a_variable_and_goes_on(
    setting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    setting(GEMMULE_TUNE="2", GEMMULE_POLL="own", GEMMULE_BUILTIN="0")
    assert run(["doctor", "--json"]) == 1
    out, err = said(capsys)
    found = json.loads(out)
    told = [(one["status"], one["found"]) for one in found if one["part"] == "settings"]
    assert told == [
        ("ok", "GEMMULE_BUILTIN=0"),
        ("note", "GEMMULE_POLL is no variable of gemmule"),
        (
            "FAIL",
            "GEMMULE_TUNE is '2'; it must be 0 (ignore stored tuning results) or 1 (use them, the "
            "default).",
        ),
    ]
    assert "did you mean GEMMULE_POOL?" in err
    assert "does not work: settings." in err
    assert [one["status"] for one in found if one["part"] == "CPU products"] == ["ok"]
    assert os.environ["GEMMULE_TUNE"] == "2"


def test_doctor_without_what_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.in_plain_words() == 0
    assert "ok    CPU products: matvec" in said(capsys)[0]


def test_doctor_survives_a_check_that_breaks() -> None:
    def broken() -> Any:
        raise OSError("boom")

    found = doctor.safely(broken)
    assert found[0].status == doctor.FAIL
    assert "boom" in found[0].found


def test_verify_counts_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--cases", "12", "--workers", "1", "--rung", "scalar_loop"]) == 0
    out, _ = said(capsys)
    assert "12 cases on cpu, seed 0" in out
    assert "0 wrong, 0 raised" in out


def test_verify_prints_what_repeats_a_failure(
    fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fault(gm, "matvec", lambda sound, a, b, **options: np.zeros(3, np.int8))
    assert run(["verify", "--cases", "2", "--workers", "1", "--rung", "scalar_loop"]) == 1
    out, err = said(capsys)
    assert "print(run(Trial(" in out
    assert "2 wrong" in err


@pytest.mark.parametrize(
    ("command", "arguments"), [(cli.cli, ["verify"]), (proofs, ["--evidence", "here"])]
)
def test_a_missing_gpu_is_told_before_anything_starts(
    fault: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    command: click.Command,
    arguments: list[str],
) -> None:
    class NoGpu:
        def machine(self, device: str) -> None:
            raise gm.DeviceError(f"no driver for {device}.")

    fault(backends, "get", lambda sound, name: NoGpu())
    assert run([*arguments, "--device", "cuda:1"], command) == 2
    assert said(capsys) == ("", "gemmule: no driver for cuda:1.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stale"], "pass --evidence FOLDER"),
        (["--evidence", "here", "--device", "cpu"], "no --device cpu"),
        (["--evidence", "here", "--anew"], "pass --check"),
    ],
)
def test_proofs_say_what_they_need(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(arguments, proofs) == 2
    assert words in said(capsys)[1]


def test_batches_are_checked_entry_by_entry() -> None:
    from gemmule_lab.files.multiply import Job

    rng = np.random.default_rng(2)
    A = rng.standard_normal((3, 1, 4, 5)).astype(np.float32)
    x = rng.standard_normal((2, 5)).astype(np.float32)
    result = gm.matvec(A, x)
    for spoiled in (False, True):
        if spoiled:
            result[2, 1, 3] += 1
        watch = check.BlockCheck(Job("matvec", A, x))
        watch(slice(0, 4), A, x, result)
        assert watch.ok is not spoiled
        assert ("(2, 1)" in watch.worst) is spoiled


def test_the_command_as_a_process(matrices: Path) -> None:
    done = ended("-m", "gemmule", "multiply", "A.npy", "x.npy")
    assert done.returncode == 0
    assert "matvec" in done.stdout
    failed = ended("-m", "gemmule", "multiply", "A.npy", "gone.npy")
    assert failed.returncode == 2
    assert failed.stderr.startswith("gemmule: ")
    assert "Traceback" not in failed.stderr


def test_help_and_import_stay_light() -> None:
    code = (
        "import sys; from gemmule_lab.cli import run; run(['--help']); "
        "heavy = {'numba', 'torch', 'scipy', 'rich', 'jinja2', 'cuda'} & set(sys.modules); "
        "sys.exit(str(sorted(heavy)) if heavy else 0)"
    )
    done = ended("-c", code)
    assert done.returncode == 0, done.stderr
    assert "multiply" in done.stdout
