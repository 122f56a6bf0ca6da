"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "light page" : "dark page"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  // A column is sorted by its numbers where it has them, else by its text; empty cells go last.
  for (const head of document.querySelectorAll("thead th")) {
    head.firstElementChild.addEventListener("click", () => {
      const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column], text = cell.dataset.v ?? cell.textContent.replace("−", "-");
        return text.trim() === "" || text === "–" ? null : Number.isNaN(Number(text)) ? text : Number(text);
      };
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === "number" && typeof b === "number" ? a - b
          : String(a).localeCompare(String(b), "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  }
})();
