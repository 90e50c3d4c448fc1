"""The looks of the HTML pages, light and dark, and their few lines of script."""

PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<link rel=icon href="data:,"><title>$title</title><style>$style</style></head>
<body><main><h1>$title</h1>$body</main><script>$script</script></body></html>
"""

STYLE = """
:root { --back: #fff; --card: #f6f7f9; --text: #1c2126; --soft: #66707a; --line: #dde1e6;
  --operator: #1668c1; --diffusion: #d9600a; --consistency: #8a3ab9; --codec: #23913c;
  --ensemble: #0d8f8f; --persistence: #8a9099; --mean: #b08a3c; --one_step: #5b76a8 }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --card: #1e2327; --text: #e4e8eb;
  --soft: #9aa5ae; --line: #363d44; --operator: #5aa7f5; --diffusion: #f79a4e;
  --consistency: #c58af0; --codec: #5cc774; --ensemble: #45c4c4; --persistence: #9aa1a9;
  --mean: #d0ac62; --one_step: #94a9d0 } }
.operator { color: var(--operator) } .diffusion { color: var(--diffusion) }
.consistency { color: var(--consistency) } .codec { color: var(--codec) }
.ensemble { color: var(--ensemble) } .persistence { color: var(--persistence) }
.mean { color: var(--mean) } .one_step { color: var(--one_step) } .truth { color: var(--text) }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1120px; margin: auto; padding: 12px 16px 60px }
h1 { font-size: 1.5em; overflow-wrap: anywhere }
h2 { margin: 1.4em 0 .2em } h3 { margin: 1.8em 0 .4em }
section { border-top: 1px solid var(--line); margin-top: 2em }
p { max-width: 52em }
.scroll { overflow-x: auto }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums }
th, td { padding: 5px 14px 5px 0; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line) }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--back);
  font-weight: 500 }
thead th { color: var(--soft); font-weight: 500 }
th.sort { cursor: pointer; white-space: normal; vertical-align: bottom }
th.sort::after { content: "\\a0\\2195" }
small { display: block; color: var(--soft); font-size: .8em; font-weight: 400 }
.budget { width: 100% } .budget td:nth-child(3) { min-width: 140px; width: 26% }
.bar { height: 1em; margin-top: .25em; background: currentColor; border-radius: 2px;
  min-width: 1px }
.probes th { white-space: normal; max-width: 34em }
.charts, .cards { display: grid; gap: 14px; --least: 360px;
  grid-template-columns: repeat(auto-fill, minmax(min(var(--least), 100%), 1fr)) }
.cards { --least: 330px }
figure, .card { margin: 0; padding: 12px; background: var(--card); border-radius: 8px;
  min-width: 0 }
figcaption i, td i { color: var(--soft) }
section > img { max-width: 100% }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font-size: 12px }
.grid { stroke: var(--line) } .level { stroke: var(--soft); stroke-dasharray: 5 4 }
.curve { fill: none; stroke: currentColor; stroke-width: 2 }
.curve.mean, .curve.persistence { stroke-dasharray: 6 3 }
.band { fill: currentColor; opacity: .16 } .fill, .dot { fill: currentColor }
.dot[opacity="0"]:hover { opacity: 1; r: 3px }
.key { margin-right: 12px; white-space: nowrap }
.key > i { display: inline-block; width: 12px; height: 3px; margin-right: 5px;
  background: currentColor; vertical-align: middle }
.legend { font-size: 12px }
.maps { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px;
  margin: 8px 0; align-items: end }
.stills { grid-template-columns: repeat(4, 1fr); gap: 4px }
.maps div { font-size: 12px; line-height: 1.3; color: var(--soft) }
.maps img, .film { width: 100%; display: block; image-rendering: pixelated; border-radius: 3px;
  background-repeat: no-repeat; margin-top: 3px }
.play { display: flex; gap: 8px; align-items: center; font-size: 13px; margin-top: 6px }
.play input { flex: 1; min-width: 0 } .play output { min-width: 5.5em; text-align: right }
button { font: inherit; color: inherit; background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px }
pre { overflow-x: auto; background: var(--card); padding: 10px; border-radius: 8px;
  font-size: 12.5px }
details { margin: .8em 0 } summary { cursor: pointer; font-weight: 500 }
dt { font-weight: 600 } dd { margin: 0 0 .5em; max-width: 60em }
@media (max-width: 620px) { .budget th:nth-child(3), .budget td:nth-child(3) { display: none }
  th, td { padding-right: 10px } }
"""

SCRIPT = """
for (const card of document.querySelectorAll('.card')) {  // a slider and a button move its frames
  const data = JSON.parse(card.querySelector('script').textContent), n = data.times.length
  const slider = card.querySelector('input'), button = card.querySelector('button')
  let timer = null
  function draw() {
    const k = +slider.value
    card.querySelector('output').textContent = 't = ' + data.times[k]
    for (const film of card.querySelectorAll('.film'))
      film.style.backgroundPositionY = n > 1 ? 100 * k / (n - 1) + '%' : 0
    for (const [kind, rows] of Object.entries(data.curves || {}))
      card.querySelector('.curve.' + kind).setAttribute('points',
        rows[k].map((v, i) => data.x[i] + ',' + v).join(' '))
    if (data.band)
      card.querySelector('.band').setAttribute('points', data.band[k].map((v, i) =>
        data.x[i < data.x.length ? i : 2 * data.x.length - 1 - i] + ',' + v).join(' '))
  }
  function stop() { clearInterval(timer); timer = null; button.textContent = 'play' }
  slider.oninput = () => { stop(); draw() }
  button.onclick = () => {
    if (timer) return stop()
    button.textContent = 'stop'
    timer = setInterval(() => { slider.value = (+slider.value + 1) % n; draw() }, 4000 / n + 40)
  }
  draw()
}
for (const table of document.querySelectorAll('table.sortable'))  // a click on a head sorts by it
  table.querySelectorAll('thead th').forEach((head, i) => {
    head.className = 'sort'
    head.onclick = () => {
      const key = row => row.cells[i].textContent || Infinity  // what is missing comes last
      const less = (a, b) => isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b
      const rows = [...table.tBodies[0].rows].sort((a, b) => less(key(a), key(b)))
      head.down = !head.down
      table.tBodies[0].append(...(head.down ? rows : rows.reverse()))
    }
  })
"""
