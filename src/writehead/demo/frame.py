"""What our HTML pages have in common: their frame and the look of text, tables and figures."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem;
  color: #1a202c; background: #fff; }
h1 { font-size: 1.7rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { text-align: right; border-bottom: 1px solid #e2e8f0; }
th:first-child, td:first-child { text-align: left; }
figcaption, footer, .note { color: #4a5568; font-size: 0.88rem; }
svg { max-width: 100%; height: auto; } code { background: #edf2f7; padding: 0.1rem 0.3rem; }
"""


def html_page(title: str, body: str, style: str) -> str:
    """A page that needs nothing else; `style` adds to what all pages have."""
    return (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}{style.lstrip()}</style>\n{body.strip()}\n</html>\n"
    )
