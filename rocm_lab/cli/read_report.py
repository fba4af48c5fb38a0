"""`rocm-attn read-report`: rows of tiles and a list of differences, from a report."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_attn.machine.releases import triton_version
from rocm_attn.machine.tuning_file import TuningFile, as_json
from rocm_attn.machine.whole_files import whole_file
from rocm_lab.first_run.findings import discrepancies
from rocm_lab.first_run.report import GpuReport
from rocm_lab.first_run.rows import rows_of
from rocm_lab.waits.objects import OBJDUMPS

TUNING, DIFFERENCES = "tuning.json", "differences.json"


def run(options: argparse.Namespace) -> None:
    """Reads options.report and writes files into options.folder. Raises BadSetting for another file or folder."""
    report = GpuReport.read(Path(options.report), options.arch)
    rows = rows_of(report, options.triton_release or triton_version())
    differences = discrepancies(report, (options.objdump,) if options.objdump else OBJDUMPS)
    facts = {
        "device": report.device,
        "arch": report.target.arch,
        "compute_units": report.target.compute_units,
        "triton": report.versions["triton"],
        "commit": report.commit,
        "date": report.date,
    }
    listed = {**facts, "differences": [asdict(each) for each in differences]}
    folder = Path(options.folder)
    place = folder / TUNING
    if place.exists() and not (folder / DIFFERENCES).exists():
        raise BadSetting(f"{place} is of no earlier report, and would be replaced; name another folder with --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / DIFFERENCES) as part:
            part.write_text(json.dumps(listed, indent=1) + "\n")
    except OSError as error:
        raise BadSetting(f"{folder} cannot be written ({error}); name another folder with --folder") from error
    # Rows of an earlier report must not be taken for rows of this one.
    place.unlink(missing_ok=True)
    if rows.rows:
        TuningFile(rows.rows).write(place)
        assert TuningFile.read(place).rows == rows.rows, "what is written is what runtimes read"
    if options.json:
        said = {"rows": [as_json(each) for each in rows.rows], "no_rows": list(rows.left_out)}
        print(json.dumps({**said, **listed}, indent=1))
        return
    lines = [
        f"{report.device} ({report.target.arch}), Triton {report.versions['triton']}, commit {report.commit}",
        f"{len(rows.rows)} rows of tiles{f' in {place}' if rows.rows else ''}",
        *(f"  {row.table.value}: {row.tiles}\n    {row.origin()}" for row in rows.rows),
        *(f"  no row: {each}" for each in rows.left_out),
        f"{len(differences)} differences",
        *(f"  {each.line()}" for each in differences),
    ]
    print("\n".join(lines))
