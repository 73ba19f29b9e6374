// Heat maps: numbers on a grid of patches, drawn over a picture.

// Inferno in eight steps: dark where little is, bright where much is, and readable without colour vision.
const RAMP = [
  [8, 6, 32],
  [52, 11, 92],
  [101, 21, 110],
  [149, 38, 103],
  [192, 58, 79],
  [228, 96, 41],
  [248, 154, 12],
  [252, 236, 140],
];

/** The colour of a share 0..1 as [r, g, b]. */
export function heatColour(share) {
  const at = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const low = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)));
}

/** Draw `values` (row by row on `grid` = [rows, columns]) over the whole canvas; `top` is the value that gets the brightest
 * colour. Smooth interpolates between the patches' centres, else each patch is one cell. */
export function drawHeat(canvas, values, grid, { top, opacity = 0.6, smooth = true } = {}) {
  const [rows, columns] = grid;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!values || values.length !== rows * columns) return false;
  const highest = top || Math.max(...values) || 1;
  const pixels = context.createImageData(canvas.width, canvas.height);
  for (let y = 0; y < canvas.height; y += 1) {
    for (let x = 0; x < canvas.width; x += 1) {
      const row = ((y + 0.5) / canvas.height) * rows;
      const column = ((x + 0.5) / canvas.width) * columns;
      const value = smooth
        ? between(values, rows, columns, row - 0.5, column - 0.5)
        : values[Math.floor(row) * columns + Math.floor(column)];
      const share = value / highest;
      // What is weak covers half as much as what is strong, so that the picture stays readable.
      pixels.data.set(
        [...heatColour(share), Math.round(255 * opacity * (0.5 + share / 2))],
        4 * (y * canvas.width + x),
      );
    }
  }
  context.putImageData(pixels, 0, 0);
  return true;
}

function between(values, rows, columns, row, column) {
  const inside = (value, count) => Math.min(count - 1, Math.max(0, value));
  const [y, x] = [inside(row, rows), inside(column, columns)];
  const [top, left] = [Math.floor(y), Math.floor(x)];
  const [bottom, right] = [Math.min(rows - 1, top + 1), Math.min(columns - 1, left + 1)];
  const [dy, dx] = [y - top, x - left];
  const at = (r, c) => values[r * columns + c];
  return (
    (at(top, left) * (1 - dx) + at(top, right) * dx) * (1 - dy) +
    (at(bottom, left) * (1 - dx) + at(bottom, right) * dx) * dy
  );
}

/** The mean of several maps of the same length. */
export const meanMap = (maps) => maps[0].map((_, i) => maps.reduce((sum, map) => sum + map[i], 0) / maps.length);
