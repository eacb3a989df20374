"""What is wrong with a system file: every problem at once, each with its place and the way out."""

from dataclasses import dataclass

from twinhull.errors import TwinhullError

MOST_SHOWN = 50


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to mend. Lines and columns count from 1; `path` is the user's (`workloads.fit.pool`)."""

    line: int
    col: int
    path: str
    message: str
    file: str

    def __str__(self) -> str:
        subject = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.col}  {subject}{self.message}"


class SystemFileError(TwinhullError):
    """Raised with all problems of a system file, sorted by place."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        lines = [str(problem) for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"{self.problems[0].file}: and {len(self.problems) - MOST_SHOWN} more")
        super().__init__("\n".join(lines))
