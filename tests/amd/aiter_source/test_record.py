"""The cases, and the document's table: one line per kernel and place, and nothing around it changes."""

from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_lab.page_parts import rows_of
from tests.amd.aiter_source.cases import CASES, GLUON, MLA_DECODE, WINDOWS, Outcome, SourceCase, Verdict
from tests.amd.aiter_source.record import INTERPRETER, Line, with_runs

DOCUMENT = "<!-- runs -->\n| AITER |\n|---|\n<!-- end of runs -->\n"
START = "| v0.1.20-0-g1 | 2026-08-18 | 3.9.0 |"
LATENT = [case for case in CASES if case.kernel == MLA_DECODE]


def right(case: SourceCase, error: float = 0.001) -> Line:
    return Line("gfx942", case, Outcome(Verdict.RIGHT, "", error))


def test_pa_decode_gluon_has_cases_of_ten_windows_and_of_none() -> None:
    cases = {case.problem.window_left for case in CASES if case.kernel == GLUON and case.planted}
    assert cases == set(WINDOWS)
    assert len(cases - {UNLIMITED_WINDOW}) == 10


def test_a_line_says_how_many_cases_are_right_and_their_largest_error() -> None:
    text = with_runs(DOCUMENT, [right(LATENT[0], 0.001), right(LATENT[1], 0.002)], START)
    (line,) = rows_of(text, "runs")
    assert line.startswith(f"{START} gfx942 | mla_decode_fwd | 2 | 0.0020 | 2 right |")


def test_a_line_names_what_is_wrong_and_why() -> None:
    wrong = Line("gfx942", LATENT[1], Outcome(Verdict.WRONG, "not | close"))
    (line,) = rows_of(with_runs(DOCUMENT, [right(LATENT[0]), wrong], START), "runs")
    assert f"| 1 right; {LATENT[1].name}: wrong: not / close |" in line


def test_a_line_is_written_anew_and_others_stay() -> None:
    first = with_runs(DOCUMENT, [right(LATENT[0]), Line(INTERPRETER, LATENT[0], Outcome(Verdict.RIGHT, ""))], START)
    second = with_runs(first, [right(LATENT[0], 0.005)], START)
    assert len(rows_of(second, "runs")) == 2
    assert "0.0050" in second
    third = with_runs(second, [right(LATENT[0])], "| v0.1.16-0-g2 | 2026-06-20 | 3.9.0 |")
    assert len(rows_of(third, "runs")) == 3
