// SPDX-License-Identifier: Apache-2.0

package patchbay

import (
	"context"
	"crypto/rand"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "patchbay.example/go/v1"
)

// Guest is one guest of an endpoint, selected by its name. Its generated clients give access to
// every method and field; their requests must contain the guest's name.
type Guest struct {
	Name        string
	Guests      pb.GuestServiceClient
	Keys        pb.StaticKeysServiceClient
	Tracepoints pb.TracepointsServiceClient
}

// Options are the options of a change.
type Options struct {
	// Reason is kept with the holds and in the audit log.
	Reason string
	// TTL is the time after which the service drops the references that the change takes; 0 means
	// never.
	TTL time.Duration
	// RetryTimeout limits the time for which the service retries while the guest is busy; 0 means
	// nearly until the deadline.
	RetryTimeout time.Duration
	AllowGuarded bool
	Force        bool
	ValidateOnly bool
	// RequestID identifies the request, so that a repeat gets the first answer. If it is empty, a
	// random one is used.
	RequestID string
}

func duration(time time.Duration) *durationpb.Duration {
	if time == 0 {
		return nil
	}
	return durationpb.New(time)
}

func requestID(given string) string {
	if given != "" {
		return given
	}
	return rand.Text()
}

// Changes returns the updates that apply op to keys, for Update and Prepare. If one of the keys is
// a glob or begins with "!", all of them are patterns of one selection. Otherwise each is the name
// of a key.
func Changes(op pb.KeyOp, keys ...string) []*pb.KeyUpdate {
	var updates []*pb.KeyUpdate
	for _, key := range keys {
		if strings.ContainsAny(key, "*?[") || strings.HasPrefix(key, "!") {
			return []*pb.KeyUpdate{{Op: op, Patterns: keys}}
		}
		updates = append(updates, &pb.KeyUpdate{Op: op, Name: key})
	}
	return updates
}

// Describe describes the guest, its kernel and its registration.
func (g *Guest) Describe(ctx context.Context) (*pb.DescribeGuestResponse, error) {
	return g.Guests.DescribeGuest(ctx, &pb.DescribeGuestRequest{Guest: g.Name})
}

// Watch yields the guest's status at once and after each change.
func (g *Guest) Watch(ctx context.Context) iter.Seq2[*pb.WatchGuestResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.WatchGuestResponse], error) {
		return g.Guests.WatchGuest(ctx, &pb.WatchGuestRequest{Guest: g.Name})
	})
}

// List lists the keys, ordered by name; patterns are globs.
func (g *Guest) List(ctx context.Context, patterns ...string) iter.Seq2[*pb.StaticKey, error] {
	return pages(func(token string) ([]*pb.StaticKey, string, error) {
		request := pb.ListStaticKeysRequest{Guest: g.Name, Patterns: patterns, PageToken: token}
		answer, err := g.Keys.ListStaticKeys(ctx, &request)
		return answer.GetKeys(), answer.GetNextPageToken(), err
	})
}

// Get returns one key with its first thousand sites.
func (g *Guest) Get(ctx context.Context, name string) (*pb.StaticKey, error) {
	answer, err := g.Keys.GetStaticKey(ctx, &pb.GetStaticKeyRequest{Guest: g.Name, Name: name})
	return answer.GetKey(), err
}

// Update changes keys in one transaction: all or nothing.
func (g *Guest) Update(ctx context.Context, updates []*pb.KeyUpdate, options Options) (*pb.UpdateStaticKeysResponse, error) {
	answer, err := g.Keys.UpdateStaticKeys(ctx, &pb.UpdateStaticKeysRequest{
		Guest:        g.Name,
		Updates:      updates,
		RequestId:    requestID(options.RequestID),
		ValidateOnly: options.ValidateOnly,
		AllowGuarded: options.AllowGuarded,
		Force:        options.Force,
		Reason:       options.Reason,
		Ttl:          duration(options.TTL),
		RetryTimeout: duration(options.RetryTimeout),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// rest fetches the pages of results that did not fit into an answer.
func (g *Guest) rest(ctx context.Context, results *[]*pb.KeyResult, token *string) error {
	var budget budget
	for *token != "" {
		request := pb.ListUpdateResultsRequest{Guest: g.Name, PageToken: *token}
		page, err := g.Keys.ListUpdateResults(ctx, &request)
		if err != nil {
			return err
		}
		if err := budget.spend(sizeOf(page.GetResults()), *token, page.GetNextPageToken()); err != nil {
			return wrap(err)
		}
		*results = append(*results, page.GetResults()...)
		*token = page.GetNextPageToken()
	}
	return nil
}

// Enable applies static_branch_enable() to each key.
func (g *Guest) Enable(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_ENABLE, keys...), Options{})
}

// Disable applies static_branch_disable() to each key.
func (g *Guest) Disable(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_DISABLE, keys...), Options{})
}

// Inc applies static_branch_inc() to each key. This client holds the reference.
func (g *Guest) Inc(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_INC, keys...), Options{})
}

// Dec applies static_branch_dec() to each key, which drops a reference that this client holds.
func (g *Guest) Dec(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_DEC, keys...), Options{})
}

// Prepare plans and checks a change, and the service keeps the plan. The guest is not changed.
func (g *Guest) Prepare(ctx context.Context, updates []*pb.KeyUpdate, options Options) (*pb.PrepareUpdateResponse, error) {
	answer, err := g.Keys.PrepareUpdate(ctx, &pb.PrepareUpdateRequest{
		Guest:        g.Name,
		Updates:      updates,
		AllowGuarded: options.AllowGuarded,
		Force:        options.Force,
		Reason:       options.Reason,
		HoldTtl:      duration(options.TTL),
		RequestId:    requestID(options.RequestID),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// Commit makes the change of a plan exactly as it was prepared.
func (g *Guest) Commit(ctx context.Context, plan *pb.PrepareUpdateResponse) (*pb.CommitUpdateResponse, error) {
	answer, err := g.Keys.CommitUpdate(ctx, &pb.CommitUpdateRequest{
		Guest: g.Name, PlanId: plan.GetPlanId(), Digest: plan.GetDigest(),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// WatchKeys yields every change from a revision of an incarnation on, or from now on if incarnation
// is "" and start is 0. The first response comes at once and has no events.
func (g *Guest) WatchKeys(ctx context.Context, incarnation string, start uint64, patterns ...string) iter.Seq2[*pb.WatchStaticKeysResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.WatchStaticKeysResponse], error) {
		return g.Keys.WatchStaticKeys(ctx, &pb.WatchStaticKeysRequest{
			Guest: g.Name, Incarnation: incarnation, StartRevision: start, Patterns: patterns,
		})
	})
}

// Holds lists the holds, ordered by key and age.
func (g *Guest) Holds(ctx context.Context, patterns ...string) iter.Seq2[*pb.Hold, error] {
	return pages(func(token string) ([]*pb.Hold, string, error) {
		request := pb.ListHoldsRequest{Guest: g.Name, Patterns: patterns, PageToken: token}
		answer, err := g.Keys.ListHolds(ctx, &request)
		return answer.GetHolds(), answer.GetNextPageToken(), err
	})
}

// Release releases holds and drops their references, in one transaction.
func (g *Guest) Release(ctx context.Context, ids ...string) (*pb.ReleaseHoldsResponse, error) {
	return g.Keys.ReleaseHolds(ctx, &pb.ReleaseHoldsRequest{
		Guest: g.Name, Ids: ids, RequestId: requestID(""),
	})
}

// Renew gives holds a new expiry; with a ttl of 0 they no longer expire.
func (g *Guest) Renew(ctx context.Context, ttl time.Duration, ids ...string) ([]*pb.Hold, error) {
	request := pb.RenewHoldsRequest{Guest: g.Name, Ids: ids, Ttl: duration(ttl)}
	answer, err := g.Keys.RenewHolds(ctx, &request)
	return answer.GetHolds(), err
}

// Arm attaches probes to events and parks them: their keys stay off, so the guest traces nothing
// yet.
func (g *Guest) Arm(ctx context.Context, patterns ...string) (*pb.ArmTracepointsResponse, error) {
	return g.Tracepoints.ArmTracepoints(ctx, &pb.ArmTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Fire turns on the keys of armed events, all in one pause.
func (g *Guest) Fire(ctx context.Context, patterns ...string) (*pb.FireTracepointsResponse, error) {
	return g.Tracepoints.FireTracepoints(ctx, &pb.FireTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Park turns off the keys of armed events, all in one pause. The keys of events that other clients
// fire stay on.
func (g *Guest) Park(ctx context.Context, patterns ...string) (*pb.ParkTracepointsResponse, error) {
	return g.Tracepoints.ParkTracepoints(ctx, &pb.ParkTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Disarm detaches the probes of events.
func (g *Guest) Disarm(ctx context.Context, patterns ...string) (*pb.DisarmTracepointsResponse, error) {
	return g.Tracepoints.DisarmTracepoints(ctx, &pb.DisarmTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Trace arms and fires events for as long as the caller's loop runs, and yields them. The first
// response comes once they fire, and has their names.
func (g *Guest) Trace(ctx context.Context, patterns ...string) iter.Seq2[*pb.StreamTracepointEventsResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.StreamTracepointEventsResponse], error) {
		return g.Tracepoints.StreamTracepointEvents(ctx, &pb.StreamTracepointEventsRequest{
			Guest: g.Name, Patterns: patterns, ArmAndFire: true,
		})
	})
}

// KernelLog yields the log of the guest's kernel from now on, read from the guest's memory or by
// the agent. The first response has no records.
func (g *Guest) KernelLog(ctx context.Context) iter.Seq2[*pb.StreamKernelLogResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.StreamKernelLogResponse], error) {
		return g.Tracepoints.StreamKernelLog(ctx, &pb.StreamKernelLogRequest{Guest: g.Name})
	})
}
