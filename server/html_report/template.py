"""The page's template (Jinja). A Python string, as only Python files are shipped with the app to where a run ends."""

PAGE = """\
{%- macro table(t) -%}
<div class="scroll" role="region" tabindex="0" aria-label="{{ t.caption }}">
<table{% if t.last_is_total %} class="totalled"{% endif %}>
<caption>{{ t.caption }}</caption>
<thead><tr>{% for c in t.columns %}<th scope="col"{% if c.numeric %} class="n"{% endif %}>{{ c.name }}</th>{% endfor %}\
</tr></thead>
<tbody>
{% for row in t.rows -%}
<tr>{% for cell in row %}{% set c = t.columns[loop.index0].shape_of(cell) %}\
{% if loop.first %}<th scope="row"{% if c %} class="{{ c }}"{% endif %}>{{ cell }}</th>\
{% else %}<td{% if c %} class="{{ c }}"{% endif %}>{{ cell }}</td>{% endif %}{% endfor %}</tr>
{% endfor -%}
</tbody></table></div>
{%- endmacro -%}

{%- macro folded(t, beside_chart) -%}
{% if t.folded or t.long %}<details{% if not beside_chart %} class="printed"{% endif %}>\
<summary>{{ t.caption }}, {{ "as a table" if beside_chart else t.size }}</summary>
{{ table(t) }}
</details>{% else %}{{ table(t) }}{% endif %}
{%- endmacro -%}

{%- macro figure(f) -%}
<figure id="figure-{{ f.name }}" aria-labelledby="figure-{{ f.name }}-title">
<h3 id="figure-{{ f.name }}-title">{{ f.title }}</h3>
{% if f.legend %}<ul class="legend" aria-label="Legend">{% for k in f.legend %}<li><span class="key {{ k.shape }} \
k-{{ k.colour }}" aria-hidden="true"></span>{{ k.words }}</li>{% endfor %}</ul>{% endif %}
<div class="wide">{{ f.drawing.wide }}</div>
<div class="narrow">{{ f.drawing.narrow }}</div>
<figcaption>{{ f.reading }}</figcaption>
{% if f.table %}{{ folded(f.table, true) }}{% endif %}
</figure>
{%- endmacro -%}

{%- macro browser(b) -%}
<p>{{ b.reading }}</p>
{% if b.texts %}
<div class="tools" role="search" aria-label="Texts of the corpus" hidden>
<label for="by-code">Code</label>
<select id="by-code"><option value="">all codes</option>{% for code in b.codes %}<option value="{{ loop.index0 }}">\
{{ code }}</option>{% endfor %}</select>
<label for="by-words">Words</label>
<input id="by-words" type="search" autocomplete="off" spellcheck="false" placeholder="search in texts and codes">
<button type="button" id="all">Show all</button>
<p id="found" role="status" aria-live="polite"></p>
</div>
<ol class="texts" id="texts">
{% for t in b.texts -%}
<li data-code="{{ t.code }}"><p class="about"><span class="code">{{ b.codes[t.code] }}</span> \
<span class="origin">{{ t.origin }}</span></p>
<p class="text">{{ t.shown }}{% if t.cut %} <span class="cut">{{ t.cut }}</span>{% endif %}</p></li>
{% endfor -%}
</ol>
<p class="none" id="none" hidden>No text here has that.</p>
{% endif %}
{%- endmacro -%}

<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{{ page.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header>
<p class="kicker">fedcorpus · report of a run</p>
<h1>{{ page.title }}</h1>
<p class="subtitle">{{ page.subtitle }}</p>
<dl class="figures">
{% for f in page.figures -%}
<div{% if f.warning %} class="warning"{% endif %}><dt>{{ f.label }}</dt><dd>{{ f.number }}</dd>\
{% if f.remark %}<dd class="remark">{{ f.remark }}</dd>{% endif %}</div>
{% endfor -%}
</dl>
</header>
<div class="columns">
<nav aria-label="Contents"><ol>
{% for s in page.sections -%}
<li><a href="#{{ s.name }}">{{ s.short }}</a></li>
{% endfor -%}
</ol></nav>
<main id="main" tabindex="-1">
{% if page.warnings %}<aside class="warnings" aria-labelledby="warnings-title">
<h2 id="warnings-title">What a reader must know</h2>
<ul>{% for w in page.warnings %}<li>{{ w }}</li>{% endfor %}</ul>
</aside>{% endif %}
{% for s in page.sections -%}
<section id="{{ s.name }}" aria-labelledby="{{ s.name }}-title">
<h2 id="{{ s.name }}-title">{{ s.title }}</h2>
{% if s.lead %}<p class="lead">{{ s.lead }}</p>{% endif %}
{% for b in s.blocks %}
{%- if b.kind == "figure" %}{{ figure(b) }}
{%- elif b.kind == "table" %}{{ folded(b, false) }}
{%- elif b.kind == "browser" %}{{ browser(b) }}
{%- else %}<p>{{ b.text }}</p>
{%- endif %}
{% endfor -%}
</section>
{% endfor -%}
</main>
</div>
<footer><p>Everything on this page is public or was noised at a site before it left it. The file is complete in \
itself: it loads nothing and sends nothing.</p></footer>
<script>{{ script }}</script>
</body>
</html>
"""
