// Click a heading to sort; a second click turns the order round. Rows without a number stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const column = head.cellIndex, sign = order === "ascending" ? 1 : -1;
    const key = (row) => row.cells[column].dataset.v ?? "";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const [p, q] = [Number(x), Number(y)];
      return sign * (Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q);
    });
    for (const row of rows) row.classList.remove("starts");
    for (const cell of body.querySelectorAll(".same")) cell.classList.remove("same");
    body.append(...rows);
  });
}
// The table of contents is open beside the page and closed above it.
const contents = document.querySelector("nav details");
if (matchMedia("(max-width: 60rem)").matches) contents.removeAttribute("open");
