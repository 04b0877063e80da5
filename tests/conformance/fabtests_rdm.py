"""The fabtests of native FI_EP_RDM endpoints."""

from fabtests_msg import Test

# No ofi_rxm: an RDM endpoint is weft's own, or the test fails.
NATIVE = (("FI_PROVIDER", "^ofi_rxm"),)


def unit(*commands):
    return [Test(command, "unit", NATIVE) for command in commands]


def pair(*commands):
    return [Test(command, "pair", NATIVE) for command in commands]


# -M mr_local: the server has no descriptors. Its 16 clients end without a farewell.
STRESS = Test(
    "fi_rdm_stress -M mr_local", "service", NATIVE, "-p PROV -s ADDRESS", "-p PROV", "stress.json", ("rpc op exit", 16)
)
UBERTEST = Test("fi_ubertest", "service", NATIVE, "-x", "", "ubertest.test", ("result: Success", 61))

# ADDRESS is replaced by the address of the run.
TESTS = [
    *unit(
        "fi_getinfo_test -s ADDRESS ADDRESS",
        "fi_av_test -g ADDRESS -n 1 -s ADDRESS",
        "fi_dom_test -n 2",
        "fi_eq_test",
        "fi_cq_test",
        "fi_cntr_test",
    ),
    *pair(
        "fi_rdm",
        "fi_rdm -U",
        "fi_av_xfer -e rdm",
        "fi_cq_data -e rdm -o senddata",
        "fi_rdm_tagged_peek",
        "fi_recv_cancel -e rdm -V",
        "fi_unexpected_msg -e rdm -I 10 -v",
        "fi_inject_test -A inject -v",
        "fi_inject_test -N -A inject -v",
        "fi_inject_test -A inj_complete -v",
        "fi_inject_test -N -A inj_complete -v",
        "fi_flood -e rdm -v -T 1",
        "fi_flood -e rdm -v -T 1 -U",
        *[f"fi_resmgmt_test -e rdm{form}" for form in ("", " -t", " -j", " -A", " -t -j -A", " -t -d", " -t -l 20000")],
        "fi_rdm_multi_client -C 10 -I 5",
        "fi_rdm_multi_client -C 10 -I 5 -U",
        "fi_rdm_cntr_pingpong -I 5",
        "fi_multi_recv -e rdm",
        "fi_shared_ctx -e rdm --no-tx-shared-ctx",
        *[f"fi_rdm_atomic -I 3 -o all{form}" for form in ("", " -v", " -U")],
    ),
    *pair(
        *[
            f"fi_rdm_{test} -I 5{flags}"
            for test in ("pingpong", "tagged_pingpong", "tagged_bw")
            for flags in ("", " -U", " -v", " -v -U")
        ]
    ),
    # three ranks that poll, on two processors: 1,000 iterations take up to 30 s
    *[Test(f"fi_multinode -x {mode}", "ranks", NATIVE, short="-I 100") for mode in ("msg", "rma")],
    STRESS,
    UBERTEST,
    *pair(
        *[f"fi_rma_bw -e rdm -I 20 -o {form}{flags}" for form in ("write", "read", "writedata") for flags in ("", " -v")],
        "fi_rma_pingpong -e rdm -I 5",
        "fi_rma_pingpong -e rdm -I 5 -o writedata",
        "fi_cq_data -e rdm -o writedata",
        "fi_multi_mr -e rdm -V",
        "fi_multi_ep -e rdm",
        "fi_rdm_rma_event",
        # not fi_rdm_multi_domain: its endpoints can receive but have no queue or counter for receives,
        # so fi_enable() is -FI_ENOCQ, as on libfabric's shm and tcp
    ),
    # the default number of messages is 1,000 of each length; 200 are more than a ring has slots
    *[
        Test(command, "pair", NATIVE, short="-I 200")
        for command in ("fi_rdm_pingpong -v", "fi_rdm_tagged_pingpong -v", "fi_rdm_tagged_bw -v", "fi_rdm_cntr_pingpong")
    ],
]
