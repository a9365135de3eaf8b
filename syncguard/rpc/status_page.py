"""The status page: one self-contained HTML file that draws `/status.json` and asks for it again every two seconds.

Texts from workers are set as text, never as markup. No external resource is loaded.
"""

from __future__ import annotations

from html import escape
from typing import Final

_STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--dim:#888;--good:#1a7f37;--bad:#c62828;--wait:#b26a00}
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:76rem;padding:0 1rem}
h1{font-size:1.2rem;margin:0 0 .2rem} h2{font-size:1rem;margin:1.4rem 0 .3rem}
table{border-collapse:collapse;width:100%} th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--dim)} .num{font-variant-numeric:tabular-nums;text-align:right}
.READY,.MATCH,.PASS,.PROCEED{color:var(--good);font-weight:600}
.BLOCKED,.MISMATCH,.FAIL,.HALT,.UNSTABLE,.QUARANTINE{color:var(--bad);font-weight:600}
.PENDING,.INCOMPLETE,.UNSUPPORTED,.NO_POWER,.WAIT,.RETRY_SYNC{color:var(--wait);font-weight:600}
.dim{color:var(--dim)} code{font-size:.92em} #error{color:var(--bad)} .scroll{overflow-x:auto}
tbody tr[data-worker]{cursor:pointer} tbody tr[aria-selected=true]{background:#8882}
"""

_SCRIPT: Final = """
"use strict";
const $ = id => document.getElementById(id);
let chosen = null;
function el(tag, text, cls) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = String(text);
  if (cls) node.className = cls;
  return node;
}
function row(cells, head) {
  const tr = el("tr");
  for (const cell of cells) tr.append(cell instanceof Node ? cell : el(head ? "th" : "td", cell));
  return tr;
}
function fill(id, head, rows) {
  const table = $(id), thead = el("thead"), tbody = el("tbody");
  thead.append(row(head, true));
  for (const r of rows) tbody.append(r);
  table.replaceChildren(thead, tbody);
}
const state = text => el("td", text, /^[A-Z_]+$/.test(text) ? text : "");
const num = (value, digits) => el("td", value === null || value === undefined ? "\\u2013" : Number(value).toPrecision(digits), "num");
const when = s => s ? new Date(s * 1000).toISOString().replace("T", " ").slice(0, 19) : "\\u2013";
function detail(worker) {
  $("detail").hidden = !worker;
  if (!worker) return;
  $("who").textContent = worker.worker;
  fill("timeline", ["time (UTC)", "phase", "reason", "version", "message"], (worker.timeline || []).slice().reverse().map(t =>
    row([when(t.at_s), state(t.phase), t.reason, t.version, t.message])));
  const v = worker.verdict;
  $("verdict").textContent = v ? `${v.status}: ${v.reason}` : "no verification yet";
  $("verdict").className = v ? v.status : "dim";
  fill("findings", ["finding", "severity", "tensor", "box", "rank", "what it means"], ((v && v.findings) || []).map(f =>
    row([f.code, f.severity, f.fqn || f.resident, f.box, f.rank, f.text])));
  const r = worker.replay;
  $("replay").textContent = r ? `${r.status}: ${r.reason}` : "no replay";
  $("replay").className = r ? r.status : "dim";
  fill("figures", ["left minus right", "tokens", "signed mean", "MAE", "p95", "p99", "max (nat)"], ((r && r.figures) || []).map(d =>
    row([d.label, d.count, num(d.signed_mean, 4), num(d.mae, 4), num(d.p95, 4), num(d.p99, 4), num(d.maximum, 4)])));
}
async function draw() {
  let data;
  try {
    const answer = await fetch("/status.json", {cache: "no-store"});
    data = await answer.json();
    $("error").textContent = "";
  } catch (error) {
    $("error").textContent = "no answer from the process behind this page: what you see is old";
    return;
  }
  $("now").textContent = when(data.now_s) + " UTC";
  $("decision").textContent = data.decision ? `${data.decision.action}: ${data.decision.reason}` : "";
  $("decision").className = data.decision ? data.decision.action : "";
  const workers = data.workers || [];
  fill("fleet", ["worker", "readiness", "phase", "reason", "version", "label", "since (UTC)", "message"], workers.map(w => {
    const tr = row([w.worker, state(w.readiness.state), w.phase, w.readiness.reason, w.readiness.weight_version, w.label || "", when(w.readiness.since_s), w.readiness.message]);
    tr.dataset.worker = w.worker;
    tr.setAttribute("aria-selected", w.worker === chosen);
    tr.addEventListener("click", () => { chosen = w.worker; draw(); });
    return tr;
  }));
  if (chosen === null && workers.length) chosen = workers[0].worker;
  detail(workers.find(w => w.worker === chosen));
  document.body.dataset.drawn = "yes";
}
draw();
setInterval(draw, 2000);
"""

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style nonce="{nonce}">{style}</style></head>
<body><h1>{title}</h1><p class="dim" id="now"></p><p id="error" role="status"></p><p id="decision"></p>
<h2>Fleet</h2><div class="scroll"><table id="fleet"></table></div>
<section id="detail" hidden><h2>Worker <span id="who"></span></h2>
<h2>Last verdict</h2><p id="verdict"></p><div class="scroll"><table id="findings"></table></div>
<h2>Last replay</h2><p id="replay"></p><div class="scroll"><table id="figures"></table></div>
<h2>Timeline</h2><div class="scroll"><table id="timeline"></table></div></section>
<script nonce="{nonce}">{script}</script></body></html>
"""


def status_page(title: str, nonce: str) -> str:
    """Return the page.

    Args:
        title: Title.
        nonce: Nonce of the response's content security policy.
    """
    return _PAGE.format(title=escape(title), nonce=escape(nonce), style=_STYLE, script=_SCRIPT)
