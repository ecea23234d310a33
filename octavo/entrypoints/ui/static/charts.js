// Drawing: lines over the last two minutes, and the map of blocks. Colours come from the style sheet.

export const SPAN_S = 120;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A canvas as sharp as the screen, cleared; null while it is not shown.
function prepare(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1;
  if (!width) return null;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

const nice = (most) => {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((m) => m * power).find((m) => m >= most);
};

const short = (value) => (value >= 1000 ? `${+(value / 1000).toPrecision(2)}k` : `${+value.toPrecision(2)}`);

// `points` are {at, ...}; `lines` are [field, colour's name, whether it is filled]. A null is a gap.
export function drawLines(canvas, points, now, lines) {
  const area = prepare(canvas);
  if (!area) return;
  const { context, width, height } = area, left = 30, bottom = height - 4, top = 8;
  const most = Math.max(...points.flatMap((p) => lines.map(([field]) => p[field] ?? 0)), 0);
  const limit = nice(most || 1);
  const x = (at) => left + (width - left) * (1 - (now - at) / SPAN_S);
  const y = (value) => bottom - (bottom - top) * (value / limit);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const value of [0, limit / 2, limit]) {
    context.strokeStyle = colour("--rule");
    context.beginPath();
    context.moveTo(left, Math.round(y(value)) + .5);
    context.lineTo(width, Math.round(y(value)) + .5);
    context.stroke();
    context.fillStyle = colour("--quiet");
    if (value || height > 75) context.fillText(short(value), 0, Math.min(y(value), height - 6));
  }
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, height);
  context.clip();
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  for (const [field, name, isFilled] of lines) {
    context.strokeStyle = context.fillStyle = colour(name);
    for (const run of runs(points, field)) {
      context.beginPath();
      run.forEach((p, i) => context[i ? "lineTo" : "moveTo"](x(p.at), y(p[field])));
      context.stroke();
      if (run.length === 1) context.fillRect(x(run[0].at) - 1.5, y(run[0][field]) - 1.5, 3, 3);
      if (!isFilled) continue;
      context.lineTo(x(run.at(-1).at), bottom);
      context.lineTo(x(run[0].at), bottom);
      context.globalAlpha = .12;
      context.fill();
      context.globalAlpha = 1;
    }
  }
  context.restore();
}

function runs(points, field) {
  const found = [];
  let run = null;
  for (const point of points) {
    if (point[field] == null) run = null;
    else if (run) run.push(point);
    else found.push(run = [point]);
  }
  return found;
}

const STATES = ["--free", "--cached", "--used", "--shared"];
const MOST_CELL = 14, LEAST_CELL = 5, GAP = 1, MOST_HEIGHT = 150;

// `blocks` are runs [state, length]. A cell is one block, or where there are too many, as many as must share one; it
// shows the most used of them. Returns how many that is.
export function drawMap(canvas, blocks) {
  const total = blocks.reduce((sum, [, length]) => sum + length, 0);
  const width = canvas.clientWidth;
  if (!width || !total) return 1;
  let cell = MOST_CELL;
  const cells = (size) => Math.floor((width + GAP) / size) * Math.floor((MOST_HEIGHT + GAP) / size);
  while (cell > LEAST_CELL && cells(cell) < total) cell--;
  const perCell = Math.max(1, Math.ceil(total / cells(cell))), number = Math.ceil(total / perCell);
  while (cell < MOST_CELL && cells(cell + 1) >= number) cell++;
  const columns = Math.floor((width + GAP) / cell);
  const height = Math.ceil(number / columns) * cell - GAP;
  canvas.style.height = `${height}px`;
  const { context } = prepare(canvas, height);
  const states = new Uint8Array(number);
  let block = 0;
  for (const [state, length] of blocks) {
    if (state) {
      const last = Math.floor((block + length - 1) / perCell);
      for (let i = Math.floor(block / perCell); i <= last; i++) states[i] = Math.max(states[i], state);
    }
    block += length;
  }
  STATES.forEach((name, state) => {
    context.fillStyle = colour(name);
    states.forEach((s, i) => {
      if (s === state) context.fillRect((i % columns) * cell, Math.floor(i / columns) * cell, cell - GAP, cell - GAP);
    });
  });
  return perCell;
}
