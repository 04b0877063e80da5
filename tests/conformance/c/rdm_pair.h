/* Two processes with pipes between them, for the programs that test endpoints of type FI_EP_RDM. A
 * program defines progress(side). */
#ifndef RDM_PAIR_H
#define RDM_PAIR_H

#include "rdm_side.h"

#include <poll.h>

static int first;		    /* whether this is the first of the two processes */
static int to_other[2], to_this[2]; /* pipes to and from the other process */

static void progress(struct side *side);

/* Both processes reach this point; each makes progress until the other one has. */
static inline void barrier(struct side *side)
{
	struct pollfd ready = { .fd = to_this[0], .events = POLLIN };
	double limit = now() + SECONDS;
	char byte = 0;

	tell(to_other[1], &byte, 1);
	while (poll(&ready, 1, 0) == 0) {
		progress(side);
		if (now() > limit)
			die("the other process does not come");
	}
	hear(to_this[0], &byte, 1);
}

#endif
