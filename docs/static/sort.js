/* The leaderboard's tables: a click on a column's head sorts by it, a second click the other way. */
document.addEventListener("DOMContentLoaded", () => {
  // The first number of a cell, or else its text; a dash comes last either way.
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replaceAll(",", "").replace("−", "-"));
    return text === "-" ? null : text === "best" ? 0 : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const table of document.querySelectorAll("#leaderboard table")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.style.cursor = "pointer";
      head.title = "sort";
      head.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
        const keyed = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        keyed.sort(([a], [b]) =>
          a === null || b === null ? (a === null) - (b === null) : direction * compare(a, b));
        table.tBodies[0].append(...keyed.map(([, row]) => row));
      });
    });
  }
});
