"""`bapo-trl report`: the report of runs on the disk."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError, OneLineParser
from .runs import read_runs
from .write import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report of the runs that the arguments name, by default the process's, and print its health lines."""
    parser = OneLineParser(
        prog="bapo-trl report",
        description="Draw what runs logged, laid over one another with seeds as bands, and say what is not healthy.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="an output_dir, a checkpoint folder or a trainer_state.json"
    )
    parser.add_argument(
        "--output", "--output_dir", metavar="FOLDER", default="report", help="where report.png goes (default: report)"
    )
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.runs)
    try:
        print(write_report(runs, Path(arguments.output) / "report.png"))
    except OSError as error:
        raise InputError(
            f"--output {arguments.output} cannot be written: {error.strerror}. Give another folder."
        ) from error
