"""The page's style sheet, from the palette."""

from server.html_report.palette import COLOURS, classes, variables

_SHEET = """
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:1.5rem;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1.0625rem/1.6 var(--serif);overflow-wrap:break-word}
header,.columns,footer{max-width:1080px;margin:0 auto;padding:0 28px}
header{padding-top:56px}
.kicker,.subtitle,nav,.legend,dl,table,summary,.tools,.about,.cut,.token,.none,footer,svg text,.skip{
font-family:var(--sans)}
.kicker{margin:0;font-size:.8125rem;letter-spacing:.04em;color:var(--muted)}
h1{margin:.35rem 0 .25rem;font-size:clamp(2rem,5.4vw,3.1rem);line-height:1.12;font-weight:600;letter-spacing:-.015em;
overflow-wrap:anywhere}
.subtitle{margin:0;color:var(--muted);font-size:.9375rem;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:0 26px;margin:36px 0 0;
border-top:2px solid var(--ink)}
.figures div{padding:14px 0 16px;border-bottom:1px solid var(--rule);display:flex;flex-direction:column}
.figures dt{order:1;font-size:.875rem}
.figures dd{margin:0;font-size:2rem;line-height:1.2;font-weight:600;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.figures .remark{order:2;font-size:.8125rem;font-weight:400;letter-spacing:0;color:var(--muted);line-height:1.4}
.figures .warning dd:not(.remark){color:var(--warn)}
.columns{display:grid;grid-template-columns:176px minmax(0,760px);gap:0 60px;margin-top:52px}
nav{position:sticky;top:28px;align-self:start;font-size:.875rem}
nav ol{list-style:none;margin:0;padding:0;counter-reset:s}
nav a{display:block;padding:6px 0 6px 14px;border-left:2px solid var(--rule);color:var(--muted);text-decoration:none}
nav a:hover{color:var(--ink)}
nav a[aria-current]{color:var(--ink);border-left-color:var(--blue);font-weight:600}
main:focus{outline:none}
section{padding-bottom:14px;margin-bottom:34px;border-bottom:1px solid var(--rule)}
section:last-child{border-bottom:0}
h2{margin:0 0 .6rem;font-size:1.625rem;line-height:1.25;font-weight:600;letter-spacing:-.01em}
h3{margin:0 0 6px;font:600 1rem/1.4 var(--sans)}
p{margin:0 0 1rem;max-width:68ch}
.lead{font-size:1.125rem}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:2px}
.skip{position:absolute;left:-9999px}
.skip:focus{left:12px;top:12px;background:var(--paper);padding:8px 14px;z-index:2}
.warnings{margin:0 0 34px;padding:16px 20px 4px;border-left:3px solid var(--warn);background:var(--raised)}
.warnings h2{font-size:1.0625rem;margin-bottom:.3rem}
.warnings ul{margin:0 0 12px;padding-left:1.2em;font-size:.9375rem;overflow-wrap:anywhere}
figure{margin:30px 0 34px}
figcaption{margin:10px 0 12px;max-width:68ch}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 22px;list-style:none;margin:0 0 12px;padding:0;font-size:.8125rem;
color:var(--muted)}
.legend li{display:flex;align-items:center;gap:8px}
.key{flex:none;width:18px;height:11px}
.key.band{height:14px}
.key.tick{width:3px;height:15px;margin:0 7px}
.key.line{height:3px}
.key.dashes,.key.hole{background:none!important;border:1.5px dashed var(--ink)}
.key.dashes{height:0;border-width:1.5px 0 0}
.key.dot,.key.ring{width:11px;height:11px;border-radius:50%;margin:0 3px}
.key.ring{background:none!important;border-width:2px;border-style:solid}
details{margin:0 0 1rem}
summary{cursor:pointer;font-size:.875rem;color:var(--link);padding:5px 0;width:fit-content}
.scroll{overflow-x:auto;margin:6px 0 22px;max-width:100%;background:
linear-gradient(to left,var(--paper) 12px,transparent 32px) 100% 0/48px 100% no-repeat local,
linear-gradient(to left,var(--rule),transparent) 100% 0/16px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.8438rem;line-height:1.45;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:6px 0;font-size:.875rem;max-width:min(760px,100vw - 32px)}
details caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;vertical-align:top;padding:6px 18px 6px 0;border-bottom:1px solid var(--rule);max-width:36ch}
th,td{white-space:nowrap}
.wordy,.unbroken,thead th{white-space:normal}
.wordy{min-width:20ch}
.unbroken{min-width:20ch;overflow-wrap:anywhere}
th:last-child,td:last-child{padding-right:2px}
thead th{font-weight:500;color:var(--muted);vertical-align:bottom;border-bottom-color:var(--muted)}
tbody th{font-weight:500}
.n{text-align:right}
.totalled tbody tr:last-child>*{border-top:1px solid var(--muted);font-weight:600}
.tools{display:grid;grid-template-columns:auto minmax(0,1fr) auto minmax(0,1fr) auto;gap:8px 12px;align-items:center;
font-size:.875rem;padding:14px 0;margin-bottom:6px;position:sticky;top:0;background:var(--paper);z-index:1;
border-bottom:1px solid var(--rule)}
.tools p{grid-column:1/-1;margin:0;color:var(--muted);font-variant-numeric:tabular-nums}
select,input,button{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--grey);
border-radius:4px;padding:7px 10px;width:100%;min-height:38px}
button{cursor:pointer;background:var(--raised);width:auto}
.texts{list-style:none;margin:0;padding:0}
.texts li{padding:16px 0 2px;border-bottom:1px solid var(--rule)}
.texts li:last-child{border-bottom:0}
.texts li[hidden],.tools[hidden]{display:none}
.about{margin:0 0 2px;font-size:.8125rem;color:var(--muted);max-width:none}
.code{color:var(--ink);font-weight:600;margin-right:10px}
.text{white-space:pre-wrap;overflow-wrap:anywhere}
.token{font-size:.6875rem;border:1px solid var(--grey);border-radius:3px;padding:0 3px;color:var(--muted);
white-space:nowrap;unicode-bidi:isolate}
.cut,.none{color:var(--muted);font-size:.875rem}
::highlight(found){background:var(--amber);color:var(--paper)}
footer{color:var(--muted);font-size:.8125rem;padding-bottom:48px}
@media (max-width:960px){
.columns{display:block;margin-top:30px}
nav{top:0;z-index:2;margin:0 -28px 30px;background:var(--paper);border-bottom:1px solid var(--rule);overflow-x:auto}
nav ol{display:flex;padding:0 22px;width:max-content}
nav a{border-left:0;border-bottom:2px solid transparent;padding:12px 8px 10px;white-space:nowrap}
nav a[aria-current]{border-bottom-color:var(--blue)}
html{scroll-padding-top:4rem}
.tools{top:46px}
}
@media (max-width:620px){
body{font-size:1rem}
header,.columns,footer{padding-left:16px;padding-right:16px}
header{padding-top:32px}
nav{margin:0 -16px 26px}
nav ol{padding:0 8px}
.figures{grid-template-columns:repeat(2,minmax(0,1fr));gap:0 20px;margin-top:26px}
.figures dd:not(.remark){font-size:1.7rem}
h2{font-size:1.4rem}
.wide{display:none}
.narrow{display:block}
.tools{grid-template-columns:auto minmax(0,1fr);position:static}
.tools button{grid-column:1/-1}
th,td{max-width:28ch;padding-right:14px}
}
@media print{
@page{margin:15mm 14mm}
:root{color-scheme:light;--paper:#fff}
html{font-size:9.5pt}
header{padding-top:0}
nav,.tools,.skip,footer,summary,details:not([open],.printed){display:none}
.printed::details-content{content-visibility:visible;display:block}
details caption{position:static;width:auto;height:auto;clip-path:none}
.columns{display:block;margin-top:18px}
header,.columns{max-width:none;padding:0}
.wide{display:block}
.narrow{display:none}
figure,tr,.texts li,.warnings,.figures div,.lead{break-inside:avoid}
h2,h3,.lead,.legend,caption{break-after:avoid}
p{orphans:3;widows:3}
section{border:0;margin-bottom:8px}
.scroll{overflow:visible}
.texts li[hidden],.texts li:nth-child(n+31){display:none}
.texts:has(li:nth-child(31))::after{content:"The first 30 texts are printed.";color:var(--muted)}
a{color:inherit;text-decoration:none}
}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""

_FONTS = (
    '--serif:Charter,"Bitstream Charter","Sitka Text",Cambria,"Liberation Serif",Georgia,serif;'
    '--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;'
)


def style_sheet() -> str:
    """All of it. Print is always on paper's colours."""
    keys = "".join(f".k-{name}{{background:var(--{name});border-color:var(--{name})}}" for name in COLOURS)
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{variables(dark=True)}}}}}"
    return f":root{{color-scheme:light dark;{_FONTS}{variables(dark=False)}}}{dark}{classes()}{keys}{_SHEET}"
