/* The audio encoder's convolutions (model.audio_encoder.AudioEncoder.convolve): three of 3 by 3 taps
 * and stride 2 over mels and time, each with a gelu. Called by audio_convolutions.py only.
 *
 * Images are [mels, times, channels]. An output's inputs are gathered into a row, so that the
 * convolution is a product of rows; a chunk's result does not depend on other chunks or threads.
 */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "parallel.h"

enum { TAPS = 3 };
/* Fewest rows of a task: enough for the widest tile to be worth widening the weights. */
enum { ROWS_A_TASK = 48 };

/* One convolution of all chunks. */
typedef struct {
    const Matrix *w;
    const float *x;      /* [chunks, mels, times, channels] */
    int64_t mels, times; /* of x */
    int64_t filled;      /* times of x before its zeros */
    int64_t lines;       /* mels of y per task */
    float *y;            /* [chunks, mels, times, channels], or for the last one [chunks, times, channels, mels] */
    int last;
} Convolution;

static int64_t half_of(int64_t count)
{
    return (count + 1) / 2;
}

/* Gather one output's inputs: zeros beyond the image. */
static void gather(float *row, const Convolution *c, const float *image, int64_t mel, int64_t time)
{
    int64_t channels = c->w->into / (TAPS * TAPS);
    for (int64_t i = 0; i < TAPS; i++, row += TAPS * channels) {
        int64_t m = 2 * mel + i - 1, first = 2 * time - 1, begin = larger(first, 0);
        int64_t end = m >= 0 && m < c->mels ? smaller(first + TAPS, c->times) : 0;
        size_t bytes = sizeof(float) * (size_t)channels;
        if (begin != first || end != first + TAPS)
            memset(row, 0, TAPS * bytes);
        if (begin < end)
            memcpy(row + (begin - first) * channels, image + (m * c->times + begin) * channels,
                   (size_t)(end - begin) * bytes);
    }
}

/* Compute some mels of a chunk, at all times. */
static void convolve_lines(void *work, int64_t task, float *gathered)
{
    const Convolution *c = work;
    int64_t out = c->w->out, mels = half_of(c->mels), times = half_of(c->times);
    int64_t tasks = (mels + c->lines - 1) / c->lines, chunk = task / tasks;
    int64_t first = task % tasks * c->lines, count = smaller(c->lines, mels - first);
    int64_t into = c->w->into, stride = row_stride(into), filled = half_of(c->filled);
    float *y = c->last ? gathered + c->lines * times * stride
                       : c->y + (chunk * mels + first) * times * out;
    for (int64_t r = 0; r < count * times; r++)
        gather(gathered + r * stride, c, c->x + chunk * c->mels * c->times * (into / (TAPS * TAPS)),
               first + r / times, r % times);
    for (int64_t p = 0; p < panels_of(out); p++)
        kernels->multiply(y + p * PANEL, out, gathered, stride, count * times, c->w, p, 1, 0, NULL);
    for (int64_t r = 0; r < count * times; r++)
        if (r % times < filled)
            kernels->gelu(y + r * out, y + r * out, out);
        else
            memset(y + r * out, 0, (size_t)out * sizeof(float));
    if (!c->last)
        return;
    for (int64_t r = 0; r < count * times; r++) {
        float *to = c->y + (chunk * times + r % times) * out * mels + first + r / times;
        for (int64_t o = 0; o < out; o++)
            to[o * mels] = y[r * out + o];
    }
}

int convolve_audio(const AudioConvolutions *a, int64_t chunks, int64_t filled, const float *x,
                   float *y)
{
    int64_t channels = a->conv[0].out, mels = half_of(a->mels), times = half_of(a->times);
    size_t whole = (size_t)(chunks * mels * times * channels);
    float *between = malloc((whole + (size_t)(chunks * half_of(mels) * half_of(times) * channels)) *
                            sizeof(float));
    if (between == NULL)
        return NO_MEMORY;
    Convolution c = {.x = x, .mels = a->mels, .times = a->times, .filled = filled};
    float *to[CONVOLUTIONS] = {between, between + whole, y};
    Team *team = open_team(a->threads);
    int done = 1;
    for (int i = 0; i < CONVOLUTIONS && done; i++) {
        mels = half_of(c.mels), times = half_of(c.times);
        c.w = a->conv + i, c.y = to[i], c.last = i == CONVOLUTIONS - 1;
        c.lines = (ROWS_A_TASK + times - 1) / times;
        int64_t into = c.w->into, rows = c.lines * times;
        done = run_tasks(team, convolve_lines, &c, chunks * ((mels + c.lines - 1) / c.lines),
                         chunks * mels * times * into * channels,
                         rows * (row_stride(into) + channels));
        c.x = c.y, c.mels = mels, c.times = times, c.filled = half_of(c.filled);
    }
    close_team(team);
    free(between);
    return done ? DONE : NO_MEMORY;
}
