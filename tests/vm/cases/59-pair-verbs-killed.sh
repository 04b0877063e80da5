# guest: pair
# kill-b: 3
# The other guest's plug is pulled during sends. libfabric's verbs provider is told nothing on rxe: it asks
# for 7 retries, and rxe (drivers/infiniband/sw/rxe/rxe_comp.c, COMPST_ERROR_RETRY) takes 7 for "for ever".
# Shown here: the plug is really pulled, transfers run before and none after. What weft must do better is
# in the pair-weft-killed cases.
b() { with verbs "$FIPEER" -s -p verbs -d rxe0 -T 60 survive "$(rxe_addr4)"; }
a() {
	survivor verbs send 3
	grep -q 'mode send: [1-9][0-9]* good' /tmp/survivor && grep -q '[1-9] sends and 16 receives left' /tmp/survivor
}
