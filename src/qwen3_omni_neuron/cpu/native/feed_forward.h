/* The feed-forward of a decoder layer: dense, or of experts (model.moe.MoeFeedForward). */

#ifndef FEED_FORWARD_H
#define FEED_FORWARD_H

#include "decoder.h"

/* m->x += the feed-forward of m->normed, `rows` rows. Returns 0 if allocation fails. */
int add_feed_forward(Team *team, const Decoder *d, const Layer *layer, const Memory *m,
                     int64_t rows);

#endif
