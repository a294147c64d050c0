// Search, and the drawing of one tensor to scale. Names from a checkpoint go into text nodes, never into markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { colors, holders, shardings, groups, bits, unit } = data;
  const pick = (id) => document.getElementById(id);
  const detail = pick("detail"), rows = pick("rows"), searchBox = pick("search"), words = searchBox.querySelector("input"), said = pick("holder");
  const MOST_HITS = 200, MOST_OPEN = 16, WIDTH = 600, TALL = 420, SVG = "http://www.w3.org/2000/svg";

  // ---- words

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const draw = (tag, attributes = {}, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const human = (n) => {
    for (const name of ["B", "KiB", "MiB", "GiB"]) {
      if (n < 1024) return name === "B" ? `${Math.round(n)} B` : `${n.toFixed(2)} ${name}`;
      n /= 1024;
    }
    return `${n.toFixed(2)} TiB`;
  };
  const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
  const nbytes = (dtype, shape) => Math.ceil((product(shape) * bits[dtype]) / 8);
  const list = (numbers) => `[${numbers.join(", ")}]`;
  const numberOf = (index) => (unit === "rank" ? holders[index][0].slice(5) : `file ${index + 1}`);
  const ranges = (indices) => {
    if (unit === "file") return indices.map((index) => holders[index][0]).join(", ");
    const sorted = [...new Set(indices.map((index) => Number(numberOf(index))))].sort((a, b) => a - b);
    const spans = [];
    for (const rank of sorted) {
      const last = spans[spans.length - 1];
      if (last && last[1] === rank - 1) last[1] = rank;
      else spans.push([rank, rank]);
    }
    const text = spans.map(([a, b]) => (a === b ? `${a}` : `${a}\u2013${b}`)).join(", ");
    return `${sorted.length === 1 ? "rank" : "ranks"} ${text}`;
  };
  const tint = (index) => {
    const [hue, light] = colors[index % colors.length];
    return `--h:${hue};--l:${light}`;
  };

  // ---- names: a pattern and the numbers for its stars

  const nameOf = (pattern, numbers) => {
    const left = numbers === "" ? [] : numbers.split(".");
    return pattern.split(".").map((part) => (part === "*" && left.length ? left.shift() : part)).join(".");
  };
  const membersOf = new Map();
  const members = (g) => {
    if (!membersOf.has(g)) {
      const [pattern, , , placed] = groups[g];
      const found = placed.flatMap(([first, texts]) => texts.split(" ").map((n) => ({ g, first, name: nameOf(pattern, n) })));
      membersOf.set(g, found);
    }
    return membersOf.get(g);
  };
  const everything = () => groups.flatMap((_, g) => members(g));
  const find = (name) => {
    for (let g = 0; g < groups.length; g++) {
      const index = members(g).findIndex((member) => member.name === name);
      if (index >= 0) return { g, index };
    }
    return null;
  };

  // ---- the drawing

  const boxOf = (sharding) => {
    if (sharding.down === null) return [WIDTH, 72, true];
    const ratio = sharding.shape[sharding.down] / sharding.shape[sharding.across];
    let width = WIDTH, height = WIDTH * ratio;
    if (height > TALL) [width, height] = [TALL / ratio, TALL];
    const fits = width >= 200 && height >= 90;
    return [Math.max(width, 200), Math.max(height, 90), fits];
  };
  const facetsOf = (sharding) => {
    const facets = new Map();
    sharding.shards.forEach((shard, index) => {
      const key = sharding.others.map((dim) => `dim ${dim} ${shard[1][dim]}:${shard[1][dim] + shard[2][dim]}`).join(", ");
      if (!facets.has(key)) facets.set(key, []);
      facets.get(key).push(index);
    });
    return facets;
  };
  const ticks = (values, scale, room) => {
    const shown = [];
    for (const value of [...values].sort((a, b) => a - b)) {
      if (!shown.length || (value - shown[shown.length - 1]) * scale >= room) shown.push(value);
    }
    return shown;
  };

  const figureOf = (sharding, indices, first, tell) => {
    const [width, height] = boxOf(sharding);
    const left = sharding.down === null ? 4 : 64, top = 34;
    const across = sharding.across === null ? 1 : sharding.shape[sharding.across] || 1;
    const down = sharding.down === null ? 1 : sharding.shape[sharding.down] || 1;
    const sx = width / across, sy = height / down;
    const svg = draw("svg", { viewBox: `0 0 ${left + width + 8} ${top + height + 6}`, width: left + width + 8, tabindex: 0, role: "img" });
    svg.append(draw("rect", { class: "frame", x: left, y: top, width, height }));
    const [begins, tops] = [new Set(), new Set()];
    const shapes = [];
    for (const index of indices) {
      const [held, offsets, sizes] = sharding.shards[index];
      const x0 = sharding.across === null ? 0 : offsets[sharding.across], y0 = sharding.down === null ? 0 : offsets[sharding.down];
      const w = (sharding.across === null ? 1 : sizes[sharding.across]) * sx, h = (sharding.down === null ? 1 : sizes[sharding.down]) * sy;
      begins.add(x0);
      tops.add(y0);
      const gap = Math.min(w, h) > 5 ? 1 : 0;
      const place = { x: left + x0 * sx + gap / 2, y: top + y0 * sy + gap / 2, width: Math.max(w - gap, 0.5), height: Math.max(h - gap, 0.5) };
      const rect = draw("rect", { ...place, class: "shard", style: tint(first + held[0]), "data-p": index });
      svg.append(rect);
      shapes.push(rect);
      if (held.length > 1) svg.append(draw("rect", { ...place, class: "hatch", "data-p": index }));
      const long = ranges(held.map((at) => first + at)), short = numberOf(first + held[0]) + (held.length > 1 ? "+" : "");
      const label = h < 14 ? "" : long.length * 7 + 8 < w ? long : short.length * 7 + 4 < w ? short : "";
      if (label) svg.append(draw("text", { class: "on-fill", "data-p": index, x: left + x0 * sx + w / 2, y: top + y0 * sy + h / 2 }, label));
    }
    if (sharding.across !== null) {
      svg.append(draw("text", { x: left, y: 11 }, `dim ${sharding.across} \u2192 ${sharding.shape[sharding.across].toLocaleString("en")}`));
      for (const value of ticks(begins, sx, 44)) svg.append(draw("text", { x: left + value * sx, y: 28 }, value));
    }
    if (sharding.down !== null) {
      svg.append(draw("text", { x: 0, y: 11 }, `dim ${sharding.down} \u2193`));
      for (const value of ticks(tops, sy, 13)) svg.append(draw("text", { x: left - 6, y: top + value * sy + 10, "text-anchor": "end" }, value));
    }
    let at = -1;
    const show = (index) => {
      at = index;
      shapes.forEach((rect, i) => rect.classList.toggle("here", i === index));
      tell(index < 0 ? null : Number(shapes[index].dataset.p));
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
    const sorted = sharding.shards.flatMap(([held, offsets, sizes]) => held.map((at, i) => ({ at: first + at, offsets, sizes, replica: i > 0 })));
    sorted.sort((a, b) => a.at - b.at);
    for (const { at, offsets, sizes, replica } of sorted) {
      const who = make("td", {}, make("i", { style: tint(at) }), holders[at][0]);
      const size = human(nbytes(dtype, sizes)) + (replica ? ", replica" : "");
      body.append(make("tr", {}, who, make("td", {}, list(offsets)), make("td", {}, list(sizes)), make("td", {}, size)));
    }
    const head = make("tr", {}, ...[unit, "offsets", "sizes", "bytes"].map((title) => make("th", { scope: "col" }, title)));
    return make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), body));
  };

  const showTensor = ({ g, index }, rank) => {
    const [, dtype, c] = groups[g], all = members(g), { name, first } = all[index], sharding = shardings[c];
    const held = [...new Set(sharding.shards.flatMap(([at]) => at.map((i) => first + i)))];
    const readout = make("p", { class: "readout", role: "status" }, "\u00a0");
    const tell = (p) => {
      readout.textContent = "\u00a0";
      if (p === null) return;
      const [at, offsets, sizes] = sharding.shards[p];
      const copies = at.length > 1 ? `, ${at.length} replicas` : "";
      readout.textContent = `${ranges(at.map((i) => first + i))}: offsets ${list(offsets)}, sizes ${list(sizes)}, ${human(nbytes(dtype, sizes))}${copies}`;
    };
    const figure = make("div", { class: "figure" });
    const facets = [...facetsOf(sharding)];
    for (const [title, indices] of facets.slice(0, 16)) {
      if (title && facets.length > 1) figure.append(make("h4", {}, title));
      const svg = figureOf(sharding, indices, first, tell);
      svg.setAttribute("aria-label", `${name} ${list(sharding.shape)}: ${sharding.text}, on ${ranges(held)}. Arrow keys step through its shards.`);
      figure.append(svg);
    }
    const asides = [];
    if (facets.length > 16) asides.push(`${facets.length - 16} more slices, listed in the table`);
    if (facets.length === 1 && sharding.others.length) asides.push(sharding.others.map((dim) => `dim ${dim} (size ${sharding.shape[dim]}) is not split and not drawn`).join("; "));
    if (!sharding.shards.length) asides.push("the tensor has no elements");
    else if (!boxOf(sharding)[2]) asides.push("not to scale: the shorter side is enlarged");
    if (sharding.shards.some(([at]) => at.length > 1)) asides.push(`hatched: several ${unit}s hold the same elements`);
    const facts = make("p", { class: "facts" }, make("b", {}, `${dtype} ${list(sharding.shape)}`), ` \u00b7 ${human(nbytes(dtype, sharding.shape))} \u00b7 `, make("b", {}, sharding.text), held.length ? ` \u00b7 ${ranges(held)}` : "");
    const table = make("details", {}, make("summary", {}, `${counted(sharding.shards.reduce((n, [at]) => n + at.length, 0), "shard")} as a table`));
    table.addEventListener("toggle", () => table.open && table.children.length === 1 && table.append(tableOf(sharding, dtype, first)));
    detail.replaceChildren(make("h3", {}, name), facts);
    if (all.length > 1) {
      const back = make("button", { type: "button" }, "\u2190 previous"), on = make("button", { type: "button" }, "next \u2192");
      back.disabled = index === 0;
      on.disabled = index === all.length - 1;
      back.onclick = () => go({ tensor: all[index - 1].name });
      on.onclick = () => go({ tensor: all[index + 1].name });
      detail.append(make("div", { class: "steps" }, back, on, `${(index + 1).toLocaleString("en")} of ${counted(all.length, "tensor")} with this sharding`));
    }
    table.open = sharding.shards.length > 1 && sharding.shards.length <= MOST_OPEN;
    detail.append(make("div", { class: "drawn" }, figure, table), readout);
    if (asides.length) detail.append(make("p", { class: "note" }, `${asides.join("; ")}.`));
    markHolders(asked().has("tensor") ? held : [], rank);
    const parted = rank !== null && held.includes(rank);
    for (const node of figure.querySelectorAll("[data-p]")) {
      node.classList.toggle("faint", parted && !sharding.shards[node.dataset.p][0].includes(rank - first));
    }
    for (const row of rows.querySelectorAll(".row")) row.classList.toggle("on", Number(row.dataset.g) === g);
    for (const hit of rows.querySelectorAll(".hit")) hit.classList.toggle("on", hit.textContent === name);
  };

  const markHolders = (held, rank) => {
    const on = new Set(held);
    document.body.classList.toggle("picked", on.size > 0 && on.size < holders.length);
    for (const node of document.querySelectorAll("[data-h]")) {
      node.classList.toggle("on", on.has(Number(node.dataset.h)));
      node.classList.toggle("here", Number(node.dataset.h) === rank);
    }
  };

  const showHolder = (index) => {
    said.textContent = "";
    if (index === null) return;
    const [label, place, bytes, tensors, layers, files, count] = holders[index];
    const where = ["stage", "dp", "tp"].map((axis, i) => (place[i] === null ? "" : `, ${axis} ${place[i]}`)).join("");
    const more = count > files.length ? ` and ${count - files.length} more` : "";
    const wrote = unit === "rank" && count ? ` \u00b7 ${files.join(", ")}${more}` : "";
    said.textContent = `${label}${where} \u00b7 ${human(bytes)} \u00b7 ${counted(tensors, "tensor")} \u00b7 layers: ${layers}${wrote}`;
  };

  // ---- search

  const patterns = [...rows.childNodes];
  const search = (text) => {
    const parts = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!parts.length) return rows.replaceChildren(...patterns);
    const hits = everything().filter(({ name }) => parts.every((part) => name.toLowerCase().includes(part)));
    rows.replaceChildren(
      make("p", { class: "note", role: "status" }, hits.length > MOST_HITS ? `${counted(hits.length, "tensor")}, the first ${MOST_HITS}:` : counted(hits.length, "tensor")),
      ...hits.slice(0, MOST_HITS).map(({ name }) => make("a", { class: "hit", href: `#tensor=${encodeURIComponent(name)}` }, name)),
    );
  };

  // ---- the URL holds the selection: #tensor=NAME&rank=INDEX&find=WORDS

  const asked = () => new URLSearchParams(location.hash.slice(1));
  const go = (changes) => {
    const now = asked();
    for (const [key, value] of Object.entries(changes)) value === null ? now.delete(key) : now.set(key, value);
    location.hash = now.toString();
  };
  const show = () => {
    const now = asked(), rank = now.get("rank");
    const index = rank !== null && /^\d+$/.test(rank) && Number(rank) < holders.length ? Number(rank) : null;
    showHolder(index);
    const wanted = now.get("tensor"), found = wanted === null ? null : find(wanted);
    if (found) showTensor(found, index);
    else if (wanted !== null) {
      detail.replaceChildren(make("p", {}, `No tensor is named ${wanted}.`));
      markHolders([], index);
    } else if (groups.length) showTensor(start, index);
  };

  // The first selection: a tensor sharded along the most dims, the largest of these.
  const spread = (sharding) => sharding.shape.filter((_, dim) => new Set(sharding.shards.map((shard) => shard[1][dim])).size > 1).length;
  const rankOf = ([, dtype, c]) => [spread(shardings[c]), nbytes(dtype, shardings[c].shape)];
  let best = 0;
  groups.forEach((group, g) => {
    const [a, b] = [rankOf(group), rankOf(groups[best])];
    const i = a.findIndex((value, k) => value !== b[k]);
    if (i >= 0 && a[i] > b[i]) best = g;
  });
  const start = { g: best, index: 0 };

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const wanted = new URLSearchParams(link.getAttribute("href").slice(1));
    if (wanted.has("rank")) go({ rank: asked().get("rank") === wanted.get("rank") ? null : wanted.get("rank") });
    else go({ tensor: wanted.get("tensor") });
  });

  searchBox.hidden = false;
  words.addEventListener("input", () => search(words.value));
  if (asked().has("find")) search((words.value = asked().get("find")));
  window.addEventListener("hashchange", show);
  show();
})();
