"""The tables of benchmarks, by the names of marks in pages: a benchmark prints the table that a page shows."""

from lab.bench.harness.markdown import Table, Text
from lab.bench.tables import cpu, gpu, quality

TABLES: dict[str, Table | Text] = {**cpu.TABLES, **quality.TABLES, **gpu.TABLES}
