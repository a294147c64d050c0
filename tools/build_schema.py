"""Write docs/report.schema.json, the JSON schema of reports.

Run it as `python tools/build_schema.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not

from ckptx.report.schema import build_schema

PATH = Path(__file__).parent.parent / "docs" / "report.schema.json"

if __name__ == "__main__":
    PATH.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")
