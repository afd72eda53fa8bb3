// Classification metrics of the last test, and which class is taken for which.

import { h } from "./dom.js";
import { percent, plural } from "./format.js";
import { cividis } from "./heatmap.js";

const HEAD = ["Of", "Images", "Accuracy", "Balanced accuracy", "Macro-F1", "AUROC"];

export function beside({ specificity, rows, left_out: leftOut, classes, confusion }) {
  const head = [...HEAD, `Sensitivity at ${specificity} specificity`];
  const line = ([of, name, images, ...values]) => [of === "all" ? name : `${of} ${name}`, String(images), ...values.map((value) => percent(value, 1))];
  return [
    h("p", { class: "note" }, "AUROC and sensitivity: one class against the rest, mean over classes. A dash: not known, such as AUROC over sites, whose predictions stay with them."),
    table("Classification metrics", head, rows.map(line)),
    leftOut ? h("p", { class: "note" }, `${plural(leftOut, "more row")} in the report.`) : "",
    ...(classes.length ? [h("h3", {}, "Classes by prediction"), matrix(classes, confusion)] : []),
  ];
}

function table(name, head, rows, cells = (text) => h("td", {}, text)) {
  const heading = (text, scope) => h("th", { scope }, text);
  const body = rows.map(([first, ...rest], row) => h("tr", {}, heading(first, "row"), rest.map((text, column) => cells(text, row, column))));
  return h(
    "div",
    { class: "scroller", tabindex: 0, role: "region", "aria-label": name },
    h("table", { class: "figures comparison" }, h("thead", {}, h("tr", {}, head.map((text) => heading(text, "col")))), h("tbody", {}, body)),
  );
}

function matrix(classes, confusion) {
  const totals = confusion.map((counts) => counts.reduce((sum, count) => sum + count, 0));
  const cell = (count, row) => {
    const share = totals[row] ? count / totals[row] : 0;
    const found = h("td", {}, count ? String(count) : "");
    found.style.background = cividis(share);
    found.style.color = share >= 0.45 ? "#000" : "#fff";
    return found;
  };
  return table("Classes by prediction", ["Class, and images taken for", ...classes], classes.map((name, row) => [name, ...confusion[row]]), cell);
}
