from ckptx.ranks import Layout
from ckptx.report.report import Report
def layout_page(report: Report, layout: Layout) -> str:
    return ""
