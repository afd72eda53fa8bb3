"""The stylesheet of the report: light and dark, on a phone and on paper. One text, because the page loads no files."""

from __future__ import annotations

LIGHT = "--ink: #24292f; --grid: #d5dae0; --paper: #ffffff; --quiet: #57606a; --shade: #f5f7f9; --warn: #8a4b00; --link: #0b5cad;"
DARK = "--ink: #e2e6ea; --grid: #3a424b; --paper: #14181d; --quiet: #a3adb7; --shade: #1d232a; --warn: #e3b341; --link: #79b8ff;"

SCREEN = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main, header, nav { margin: 0 auto; max-width: 78rem; padding: 0 1rem; }
header { padding-top: 1.5rem; }
main { padding-bottom: 4rem; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 29rem), 1fr)); gap: 0 2rem; }
main:focus { outline: none; }
section { min-width: 0; grid-column: 1 / -1; }
section.half { grid-column: auto; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
h2, h3 { scroll-margin-top: .5rem; }
p { max-width: 60rem; margin: .6rem 0; }
p, figcaption, dt, li { color: var(--quiet); }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: 1rem; top: -4rem; padding: .5rem 1rem; background: var(--paper);
  border: 1px solid var(--link); z-index: 2; }
.skip:focus { top: .5rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .75rem 0 0; padding: 0; list-style: none; }
nav a { display: inline-block; padding: .2rem 0; }
.notes { margin: .75rem 0; padding-left: 1.1rem; max-width: 60rem; font-size: .9rem; }
.notes li { color: var(--warn); }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th { color: var(--quiet); font-weight: 600; vertical-align: bottom; }
thead th[colspan] { text-align: center; }
thead tr + tr th { border-bottom: 2px solid var(--grid); }
tbody th { font-weight: 500; }
th:first-child { position: sticky; left: 0; max-width: 20rem; padding-left: 0; background: var(--paper);
  text-align: left; white-space: normal; overflow-wrap: break-word; }
tbody tr:hover > * { background: var(--shade); }
.grid td:nth-child(even), .grid thead tr:first-child th[colspan] { border-left: 1px solid var(--grid); }
tbody th { min-width: 9rem; }
.text thead th { text-align: left; }
.text td { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 4rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 29rem), 1fr)); gap: 1.75rem 2rem; align-items: start; }
figure { margin: .5rem 0; min-width: 0; max-width: 40rem; }
figcaption { font-size: .9rem; margin-top: .35rem; }
svg { display: block; width: 100%; height: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .2rem 0; font-weight: 600; }
details.run { border: 1px solid var(--grid); border-radius: 6px; padding: .3rem .8rem; }
pre { overflow-x: auto; margin: .5rem 0; padding: .75rem 1rem; background: var(--shade); border-radius: 6px;
  font-size: .82rem; line-height: 1.4; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; font-size: .9rem; }
dd { margin: 0; }
.paper { display: none; }
@media (max-width: 40rem) {
  h1 { font-size: 1.4rem; }
  th:first-child { min-width: 6rem; max-width: 7.5rem; }
  th, td { padding: .35rem .4rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
}
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
"""

# in print nothing scrolls or folds: folded parts are opened or left out
PRINT = """
@page { size: A4; margin: 13mm; }
@media print {
  html { font-size: 9pt; }
  main, header { max-width: none; padding: 0; }
  main { padding-bottom: 0; grid-template-columns: 1fr 1fr; gap: 0 1.2rem; }
  .half { break-inside: avoid; }
  .half .pictures { grid-template-columns: 1fr; }
  .half:has(details:not(.screen)) { grid-column: 1 / -1; }
  .half:has(details:not(.screen)) .pictures { grid-template-columns: 1fr 1fr; }
  nav, .skip, .screen { display: none; }
  .paper { display: block; }
  h2 { margin-top: 1.4rem; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  table { width: 100%; font-size: 7.2pt; }
  thead { display: table-header-group; }
  th, td { padding: .15rem .25rem; white-space: normal; }
  th:first-child { position: static; min-width: 25mm; max-width: none; }
  th:first-child, .text th, .text td { overflow-wrap: anywhere; }
  tr, figure, dl { break-inside: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; gap: 1rem; }
  figure { max-width: none; }
  figcaption { font-size: 8pt; }
  pre { white-space: pre-wrap; overflow: visible; font-size: 7.5pt; columns: 2; }
  details > summary { list-style: none; cursor: auto; break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; display: block; }
  a { color: inherit; text-decoration: none; }
}
"""

STYLE = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"
    f"@media print {{ :root {{ color-scheme: light; {LIGHT} }} }}\n{SCREEN}{PRINT}"
)
