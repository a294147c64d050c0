// Script of the layout page: search, and the drawing of one tensor to scale. Names from a checkpoint go into text nodes, never into markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { colors, holders, shardings, groups, bits, unit } = data;
  const byId = (id) => document.getElementById(id);
  const detail = byId("detail"), rows = byId("rows"), searchBox = byId("search"), searchInput = searchBox.querySelector("input"), holderReadout = byId("holder");
  const MAX_HITS = 200, MAX_SHARDS_OPEN = 16, WIDTH = 600, MAX_HEIGHT = 420, SVG = "http://www.w3.org/2000/svg";

  // ---- elements, and numbers as text

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const makeSvg = (tag, attributes = {}, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const humanBytes = (n) => {
    for (const name of ["B", "KiB", "MiB", "GiB"]) {
      const text = n.toFixed(name === "B" ? 0 : 2);
      if (Number(text) < 1024) return `${text} ${name}`;
      n /= 1024;
    }
    return `${n.toFixed(2)} TiB`;
  };
  const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
  const nbytes = (dtype, shape) => Math.ceil((product(shape) * bits[dtype]) / 8);
  const list = (numbers) => `[${numbers.join(", ")}]`;
  const holderNumber = (index) => (unit === "rank" ? holders[index][0].slice(5) : `file ${index + 1}`);
  const holdersText = (indices) => {
    if (unit === "file") return indices.map((index) => holders[index][0]).join(", ");
    const sorted = [...new Set(indices.map((index) => Number(holderNumber(index))))].sort((a, b) => a - b);
    const spans = [];
    for (const rank of sorted) {
      const last = spans[spans.length - 1];
      if (last && last[1] === rank - 1) last[1] = rank;
      else spans.push([rank, rank]);
    }
    const text = spans.map(([a, b]) => (a === b ? `${a}` : `${a}\u2013${b}`)).join(", ");
    return `${sorted.length === 1 ? "rank" : "ranks"} ${text}`;
  };
  const colorStyle = (index) => {
    const [hue, light] = colors[index % colors.length];
    return `--h:${hue};--l:${light}`;
  };

  // ---- names: a pattern and the numbers for its stars

  const nameOf = (pattern, numbers) => {
    const remaining = numbers === "" ? [] : numbers.split(".");
    return pattern.split(".").map((part) => (part === "*" && remaining.length ? remaining.shift() : part)).join(".");
  };
  const membersByGroup = new Map();
  const members = (g) => {
    if (!membersByGroup.has(g)) {
      const [pattern, , , indicesByHolder] = groups[g];
      const found = indicesByHolder.flatMap(([first, texts]) => texts.split(" ").map((n) => ({ g, first, name: nameOf(pattern, n) })));
      membersByGroup.set(g, found);
    }
    return membersByGroup.get(g);
  };
  const allMembers = () => groups.flatMap((_, g) => members(g));
  const find = (name) => {
    for (let g = 0; g < groups.length; g++) {
      const index = members(g).findIndex((member) => member.name === name);
      if (index >= 0) return { g, index };
    }
    return null;
  };

  // ---- the drawing of a tensor, one figure per slice of its undrawn dims

  const boxOf = (sharding) => {
    if (sharding.vertical === null) return [WIDTH, 72, true];
    const ratio = sharding.shape[sharding.vertical] / sharding.shape[sharding.horizontal];
    let width = WIDTH, height = WIDTH * ratio;
    if (height > MAX_HEIGHT) [width, height] = [MAX_HEIGHT / ratio, MAX_HEIGHT];
    const fits = width >= 200 && height >= 90;
    return [Math.max(width, 200), Math.max(height, 90), fits];
  };
  const slicesOf = (sharding) => {
    const slices = new Map();
    sharding.shards.forEach((shard, index) => {
      const key = sharding.undrawn.map((dim) => `dim ${dim} ${shard[1][dim]}:${shard[1][dim] + shard[2][dim]}`).join(", ");
      if (!slices.has(key)) slices.set(key, []);
      slices.get(key).push(index);
    });
    return slices;
  };
  const ticks = (values, scale, room) => {
    const shown = [];
    for (const value of [...values].sort((a, b) => a - b)) {
      if (!shown.length || (value - shown[shown.length - 1]) * scale >= room) shown.push(value);
    }
    return shown;
  };

  const figureOf = (sharding, indices, first, onShard) => {
    const [width, height] = boxOf(sharding);
    const left = sharding.vertical === null ? 4 : 64, top = 34;
    const columns = sharding.horizontal === null ? 1 : sharding.shape[sharding.horizontal] || 1;
    const rowCount = sharding.vertical === null ? 1 : sharding.shape[sharding.vertical] || 1;
    const sx = width / columns, sy = height / rowCount;
    const svg = makeSvg("svg", { viewBox: `0 0 ${left + width + 8} ${top + height + 6}`, width: left + width + 8, tabindex: 0, role: "img" });
    svg.append(makeSvg("rect", { class: "frame", x: left, y: top, width, height }));
    const [begins, tops] = [new Set(), new Set()];
    const shapes = [];
    for (const index of indices) {
      const [holderIndices, offsets, sizes] = sharding.shards[index];
      const x0 = sharding.horizontal === null ? 0 : offsets[sharding.horizontal], y0 = sharding.vertical === null ? 0 : offsets[sharding.vertical];
      const w = (sharding.horizontal === null ? 1 : sizes[sharding.horizontal]) * sx, h = (sharding.vertical === null ? 1 : sizes[sharding.vertical]) * sy;
      begins.add(x0);
      tops.add(y0);
      const gap = Math.min(w, h) > 5 ? 1 : 0;
      const box = { x: left + x0 * sx + gap / 2, y: top + y0 * sy + gap / 2, width: Math.max(w - gap, 0.5), height: Math.max(h - gap, 0.5) };
      const rect = makeSvg("rect", { ...box, class: "shard", style: colorStyle(first + holderIndices[0]), "data-p": index });
      svg.append(rect);
      shapes.push(rect);
      if (holderIndices.length > 1) svg.append(makeSvg("rect", { ...box, class: "hatch", "data-p": index }));
      const long = holdersText(holderIndices.map((at) => first + at)), short = holderNumber(first + holderIndices[0]) + (holderIndices.length > 1 ? "+" : "");
      const label = h < 14 ? "" : long.length * 7 + 8 < w ? long : short.length * 7 + 4 < w ? short : "";
      if (label) svg.append(makeSvg("text", { class: "on-fill", "data-p": index, x: left + x0 * sx + w / 2, y: top + y0 * sy + h / 2 }, label));
    }
    if (sharding.horizontal !== null) {
      svg.append(makeSvg("text", { x: left, y: 11 }, `dim ${sharding.horizontal} \u2192 ${sharding.shape[sharding.horizontal].toLocaleString("en")}`));
      for (const value of ticks(begins, sx, 44)) svg.append(makeSvg("text", { x: left + value * sx, y: 28 }, value));
    }
    if (sharding.vertical !== null) {
      svg.append(makeSvg("text", { x: 0, y: 11 }, `dim ${sharding.vertical} \u2193`));
      for (const value of ticks(tops, sy, 13)) svg.append(makeSvg("text", { x: left - 6, y: top + value * sy + 10, "text-anchor": "end" }, value));
    }
    let at = -1;
    const show = (index) => {
      at = index;
      shapes.forEach((rect, i) => rect.classList.toggle("here", i === index));
      onShard(index < 0 ? null : Number(shapes[index].dataset.p));
    };
    svg.addEventListener("pointermove", (event) => show(shapes.indexOf(event.target)));
    svg.addEventListener("pointerleave", () => show(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show((at + step + shapes.length + (at < 0 && step < 0 ? 1 : 0)) % shapes.length);
    });
    return svg;
  };

  const tableOf = (sharding, dtype, first) => {
    const body = make("tbody");
    const sorted = sharding.shards.flatMap(([holderIndices, offsets, sizes]) => holderIndices.map((at, i) => ({ at: first + at, offsets, sizes, replica: i > 0 })));
    sorted.sort((a, b) => a.at - b.at);
    for (const { at, offsets, sizes, replica } of sorted) {
      const holderCell = make("td", {}, make("i", { style: colorStyle(at) }), holders[at][0]);
      const size = humanBytes(nbytes(dtype, sizes)) + (replica ? ", replica" : "");
      body.append(make("tr", {}, holderCell, make("td", {}, list(offsets)), make("td", {}, list(sizes)), make("td", {}, size)));
    }
    const head = make("tr", {}, ...[unit, "offsets", "sizes", "bytes"].map((title) => make("th", { scope: "col" }, title)));
    return make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), body));
  };

  const showTensor = ({ g, index }, rank) => {
    const [, dtype, c] = groups[g], all = members(g), { name, first } = all[index], sharding = shardings[c];
    const holderIndices = [...new Set(sharding.shards.flatMap(([at]) => at.map((i) => first + i)))];
    const readout = make("p", { class: "readout", role: "status" }, "\u00a0");
    const onShard = (p) => {
      readout.textContent = "\u00a0";
      if (p === null) return;
      const [at, offsets, sizes] = sharding.shards[p];
      const copies = at.length > 1 ? `, ${at.length} replicas` : "";
      readout.textContent = `${holdersText(at.map((i) => first + i))}: offsets ${list(offsets)}, sizes ${list(sizes)}, ${humanBytes(nbytes(dtype, sizes))}${copies}`;
    };
    const figure = make("div", { class: "figure" });
    const slices = [...slicesOf(sharding)];
    for (const [title, indices] of slices.slice(0, 16)) {
      if (title && slices.length > 1) figure.append(make("h4", {}, title));
      const svg = figureOf(sharding, indices, first, onShard);
      svg.setAttribute("aria-label", `${name} ${list(sharding.shape)}: ${sharding.text}, on ${holdersText(holderIndices)}. Arrow keys step through its shards.`);
      figure.append(svg);
    }
    const notes = [];
    if (slices.length > 16) notes.push(`${slices.length - 16} more slices, listed in the table`);
    if (slices.length === 1 && sharding.undrawn.length) notes.push(sharding.undrawn.map((dim) => `dim ${dim} (size ${sharding.shape[dim]}) is not split and not drawn`).join("; "));
    if (!sharding.shards.length) notes.push("the tensor has no elements");
    else if (!boxOf(sharding)[2]) notes.push("not to scale: the shorter side is enlarged");
    if (sharding.shards.some(([at]) => at.length > 1)) notes.push(`hatched: several ${unit}s hold the same elements`);
    const facts = make("p", { class: "facts" }, make("b", {}, `${dtype} ${list(sharding.shape)}`), ` \u00b7 ${humanBytes(nbytes(dtype, sharding.shape))} \u00b7 `, make("b", {}, sharding.text), holderIndices.length ? ` \u00b7 ${holdersText(holderIndices)}` : "");
    const table = make("details", {}, make("summary", {}, `${counted(sharding.shards.reduce((n, [at]) => n + at.length, 0), "shard")} as a table`));
    table.addEventListener("toggle", () => table.open && table.children.length === 1 && table.append(tableOf(sharding, dtype, first)));
    detail.replaceChildren(make("h3", {}, name), facts);
    if (all.length > 1) {
      const previous = make("button", { type: "button" }, "\u2190 previous"), next = make("button", { type: "button" }, "next \u2192");
      previous.disabled = index === 0;
      next.disabled = index === all.length - 1;
      previous.onclick = () => select({ tensor: all[index - 1].name });
      next.onclick = () => select({ tensor: all[index + 1].name });
      detail.append(make("div", { class: "steps" }, previous, next, `${(index + 1).toLocaleString("en")} of ${counted(all.length, "tensor")} with this pattern and sharding`));
    }
    table.open = sharding.shards.length > 1 && sharding.shards.length <= MAX_SHARDS_OPEN;
    detail.append(make("div", { class: "drawn" }, figure, table), readout);
    if (notes.length) detail.append(make("p", { class: "note" }, `${notes.join("; ")}.`));
    markHolders(selection().has("tensor") ? holderIndices : [], rank);
    const isHolder = rank !== null && holderIndices.includes(rank);
    for (const node of figure.querySelectorAll("[data-p]")) {
      node.classList.toggle("faint", isHolder && !sharding.shards[node.dataset.p][0].includes(rank - first));
    }
    for (const row of rows.querySelectorAll(".row")) row.classList.toggle("on", Number(row.dataset.g) === g);
    for (const hit of rows.querySelectorAll(".hit")) hit.classList.toggle("on", hit.textContent === name);
  };

  const markHolders = (holderIndices, rank) => {
    const on = new Set(holderIndices);
    document.body.classList.toggle("picked", on.size > 0 && on.size < holders.length);
    for (const node of document.querySelectorAll("[data-h]")) {
      node.classList.toggle("on", on.has(Number(node.dataset.h)));
      node.classList.toggle("here", Number(node.dataset.h) === rank);
    }
  };

  const showHolder = (index) => {
    holderReadout.textContent = "";
    if (index === null) return;
    const [label, coordinates, bytes, tensors, layers, files, count] = holders[index];
    const coordinatesText = ["stage", "dp", "tp"].map((axis, i) => (coordinates[i] === null ? "" : `, ${axis} ${coordinates[i]}`)).join("");
    const more = count > files.length ? ` and ${count - files.length} more` : "";
    const filesText = unit === "rank" && count ? ` \u00b7 ${files.join(", ")}${more}` : "";
    holderReadout.textContent = `${label}${coordinatesText} \u00b7 ${humanBytes(bytes)} \u00b7 ${counted(tensors, "tensor")} \u00b7 layers: ${layers}${filesText}`;
  };

  // ---- search

  const patterns = [...rows.childNodes];
  const search = (text) => {
    const parts = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!parts.length) return rows.replaceChildren(...patterns);
    const hits = allMembers().filter(({ name }) => parts.every((part) => name.toLowerCase().includes(part)));
    rows.replaceChildren(
      make("p", { class: "note", role: "status" }, hits.length > MAX_HITS ? `${counted(hits.length, "tensor")}, the first ${MAX_HITS}:` : counted(hits.length, "tensor")),
      ...hits.slice(0, MAX_HITS).map(({ name }) => make("a", { class: "hit", href: `#tensor=${encodeURIComponent(name)}` }, name)),
    );
  };

  // ---- the URL holds the selection: #tensor=NAME&rank=INDEX&find=TEXT

  const selection = () => new URLSearchParams(location.hash.slice(1));
  const select = (changes) => {
    const parameters = selection();
    for (const [key, value] of Object.entries(changes)) value === null ? parameters.delete(key) : parameters.set(key, value);
    location.hash = parameters.toString();
  };
  const show = () => {
    const parameters = selection(), rank = parameters.get("rank");
    const index = rank !== null && /^\d+$/.test(rank) && Number(rank) < holders.length ? Number(rank) : null;
    showHolder(index);
    const wanted = parameters.get("tensor"), found = wanted === null ? null : find(wanted);
    if (found) showTensor(found, index);
    else if (wanted !== null) {
      detail.replaceChildren(make("p", {}, `No tensor is named ${wanted}.`));
      markHolders([], index);
    } else if (groups.length) showTensor(start, index);
  };

  // The initial selection: a tensor that is sharded along the most dims; of several, the largest.
  const shardedDims = (sharding) => sharding.shape.filter((_, dim) => new Set(sharding.shards.map((shard) => shard[1][dim])).size > 1).length;
  const sortKey = ([, dtype, c]) => [shardedDims(shardings[c]), nbytes(dtype, shardings[c].shape)];
  let best = 0;
  groups.forEach((group, g) => {
    const [a, b] = [sortKey(group), sortKey(groups[best])];
    const i = a.findIndex((value, k) => value !== b[k]);
    if (i >= 0 && a[i] > b[i]) best = g;
  });
  const start = { g: best, index: 0 };

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const wanted = new URLSearchParams(link.getAttribute("href").slice(1));
    if (wanted.has("rank")) select({ rank: selection().get("rank") === wanted.get("rank") ? null : wanted.get("rank") });
    else select({ tensor: wanted.get("tensor") });
  });

  searchBox.hidden = false;
  searchInput.addEventListener("input", () => search(searchInput.value));
  if (selection().has("find")) search((searchInput.value = selection().get("find")));
  window.addEventListener("hashchange", show);
  show();
})();
